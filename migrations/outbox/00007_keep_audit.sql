-- The audit is kept as it was written, also from the login of a relay, which carries bulk operations on.

-- +goose Up
-- +goose StatementBegin
CREATE FUNCTION outbox_keep_audit() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF OLD.state = 'done' -- which nothing goes on with
       OR OLD.state <> 'running' AND (NEW.state <> 'running' OR NEW.done <> OLD.done) -- an operation that ended can go on, and changes nothing before
       OR NEW.done < OLD.done OR NEW.updated_at < OLD.updated_at
       OR (NEW.id, NEW.at, NEW.actor, NEW.origin, NEW.action, NEW.destination, NEW.event_id, NEW.selection, NEW.matched)
          IS DISTINCT FROM (OLD.id, OLD.at, OLD.actor, OLD.origin, OLD.action, OLD.destination, OLD.event_id, OLD.selection, OLD.matched) THEN
        RAISE EXCEPTION 'outbox_audit: entry % is kept as it was written', OLD.id
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END
$$;
-- +goose StatementEnd

CREATE TRIGGER outbox_audit_is_kept BEFORE UPDATE ON outbox_audit FOR EACH ROW EXECUTE FUNCTION outbox_keep_audit();

-- +goose Down
DROP TRIGGER outbox_audit_is_kept ON outbox_audit;
DROP FUNCTION outbox_keep_audit();

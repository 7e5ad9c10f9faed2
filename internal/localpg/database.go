package localpg

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// CreateDatabase makes the database name as a copy of template, or an empty one
// when template is "". No session may be connected to the template meanwhile.
func (s *Server) CreateDatabase(ctx context.Context, name, template string) error {
	if template == "" {
		template = "template0"
	}
	create := "CREATE DATABASE " + pgx.Identifier{name}.Sanitize() + " TEMPLATE " + pgx.Identifier{template}.Sanitize()
	err := s.administer(ctx, func(conn *pgx.Conn) string {
		// PostgreSQL 14 copies the files anyway. The default since 15 writes every page to the log
		// too, and the first session has to rebuild the cache file of the catalogue that a copy of
		// the files includes.
		if strings.HasPrefix(conn.PgConn().ParameterStatus("server_version"), "14") {
			return create
		}
		return create + " STRATEGY file_copy"
	})
	if err != nil {
		return fmt.Errorf("create database %s: %w", name, err)
	}
	return nil
}

// DropDatabase removes the database name and ends every session on it. It is
// no error when there is none.
func (s *Server) DropDatabase(ctx context.Context, name string) error {
	drop := "DROP DATABASE IF EXISTS " + pgx.Identifier{name}.Sanitize() + " WITH (FORCE)"
	if err := s.administer(ctx, func(*pgx.Conn) string { return drop }); err != nil {
		return fmt.Errorf("drop database %s: %w", name, err)
	}
	return nil
}

// administer runs one statement on the maintenance database. It keeps the connection: a new one for
// every statement took a third of the time of a small test. A connection that failed, as after a
// restart, is replaced once.
func (s *Server) administer(ctx context.Context, statement func(*pgx.Conn) string) error {
	s.administration.Lock()
	defer s.administration.Unlock()
	for {
		kept := s.admin != nil
		if !kept {
			conn, err := pgx.Connect(ctx, s.DSN("postgres"))
			if err != nil {
				return err
			}
			s.admin = conn
		}
		_, err := s.admin.Exec(ctx, statement(s.admin))
		if err == nil || !s.admin.IsClosed() {
			return err
		}
		s.admin = nil
		if !kept || ctx.Err() != nil {
			return err
		}
	}
}

func (s *Server) closeAdministration() {
	s.administration.Lock()
	defer s.administration.Unlock()
	if s.admin != nil {
		_ = s.admin.Close(context.Background())
		s.admin = nil
	}
}

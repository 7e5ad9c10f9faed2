import type { Server } from 'node:http';
import type { Express } from 'express';
import type { Pool, PoolClient } from 'pg';

/** An event, from the verified headers of its request. */
export interface Event {
  idempotencyKey: string;
  type: string;
  version: string;
  id: string | null;
  createdAt: string;
  notAfter: string | null;
  reference: string | null;
  /** The destination by which the sender calls this receiver. */
  destination: string | null;
}

/** A refusal, as docs/wire.md lists it. A handler throws one to decide the answer. */
export class Problem extends Error {
  constructor(status: number, name: string, detail: string);
  readonly status: number;
}

/**
 * The effect of an event. It writes through client, in the transaction that also remembers the event, and neither commits nor
 * rolls back. After any error everything is rolled back.
 */
export type Handler = (client: PoolClient, event: Event, body: Buffer) => Promise<unknown>;

export interface Config {
  pool: Pool;
  /** Unique among the receivers that share a database. */
  receiver: string;
  /** The sender; keys of two senders are independent. */
  source: string;
  /** `whsec_…`; several separated by commas while they rotate. */
  secrets: string;
  handle: Handler;
  /** A query whose first column has the key of each effect of this source, a row for each. By it `outbox-relay reconcile` finds effects that happened twice or are gone. */
  effects?: string;
  /** Of the destination's URL. Default: `/webhooks/finance`. Questions of `outbox-relay reconcile` come to path/reconcile. */
  path?: string;
}

/** Returns an Express application that takes events at path, and answers `outbox-relay reconcile` at path/reconcile. Mount it before anything that reads bodies. */
export function createReceiver(config: Config): Express;

/**
 * Lets a verified event take effect unless it has, and returns the status to answer; replayed: it is that of an earlier answer. It rejects
 * with a {@link Problem}. Set `pool.on('error', …)` and, for each `connect`, `client.on('error', …)`: without them a lost connection ends the process.
 */
export function once(config: Pick<Config, 'pool' | 'receiver' | 'source' | 'handle'>, event: Event, body: Buffer): Promise<{ status: number; replayed: boolean }>;

/**
 * Returns a function that answers a question of `outbox-relay reconcile` with JSON. It rejects with a {@link Problem}. Keep it for the life of the process: it
 * answers each question once.
 */
export function reconciler(config: Pick<Config, 'pool' | 'receiver' | 'source' | 'secrets' | 'effects'>): (headers: Headers, body: Buffer) => Promise<string>;

/** Answers requests to app. Defaults: 127.0.0.1, 8080, 10. */
export function serve(app: Express, options?: { host?: string; port?: number; bodySeconds?: number }): Server;

type Headers = NodeJS.Dict<string[]>;

/** Reads one secret, or several separated by commas. */
export function parseSecrets(list: string): Buffer[];

/** Refuses what no body can make valid, with a {@link Problem}. headers: `request.headersDistinct`. */
export function precheck(headers: Headers): void;

/** Refuses a request without a valid signature `x1`, with a {@link Problem}. */
export function verify(secrets: Buffer[], headers: Headers, body: Buffer): void;

/** Reads verified headers. */
export function eventOf(headers: Headers): Event;

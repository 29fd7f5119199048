/** Requests that are safe to retry, from a browser. All times are in milliseconds. */

export interface Retry {
  /** How many attempts one call may have, the first included; 6. */
  attemptsMax: number;
  /** How long all attempts together may take; no attempt begins later; 60 s. */
  deadlineMs: number;
  /** How long one attempt may take; 20 s. */
  timeoutMs: number;
  /** The pause before retry n is a random part of this * 2 ** (n - 1); 200 ms. */
  backoffBaseMs: number;
  backoffMaxMs: number;
  /** The longest `Retry-After` that is obeyed; 60 s. */
  retryAfterMaxMs: number;
  /** Whether an expired key is replaced by a new one, once. The action may then happen twice. */
  renewExpired: boolean;
  /** How long the server remembers a key; 24 h. */
  serverWindowMs: number;
  /**
   * Of the outbox: how long an action that cannot be sent, or whose outcome is unknown, holds back
   * the later ones of its lane; 7 days.
   */
  laneWaitMs: number;
}

export declare const RETRY: Readonly<Retry>;

/** A setting or an argument is wrong; nothing was sent or stored. */
export declare class Misconfigured extends Error {}

/** Limits the retries of all calls, so that they do not add to the load of a failing server. */
export declare class RetryBudget {
  constructor(tokensMax?: number, refill?: number);
  readonly tokens: number;
  take(): boolean;
  give(): void;
}

/** Text, a Blob, bytes, form fields; any other value is sent as JSON. */
export type Body = unknown;
type HeaderValues = Record<string, string>;

export interface ClientOptions {
  /** The address that paths are relative to; by default that of the page. */
  baseUrl?: string;
  retry?: Partial<Retry>;
  budget?: RetryBudget;
  /** Returns headers with credentials, before each attempt; they are never stored. */
  sign?: (
    method: string,
    url: string,
    body: string | Blob | null,
  ) => HeaderValues | Promise<HeaderValues>;
  /** The name of the database of the outbox; "coatcheck". */
  database?: string;
}

export interface KeyOptions {
  headers?: HeaderValues;
  /** The key; by default a new one for each POST and PATCH. */
  key?: string;
  /** What the action is for, such as "order-17": the same reference is the same key. */
  reference?: string;
}

export interface Result {
  /** "unknown": it may have happened; send it again with the same key to find out. */
  outcome: "done" | "refused" | "unknown";
  attempts: number;
  wasReplayed: boolean;
  key: string | null;
  /** Why the client stopped without a definite answer; empty if it had one. */
  gaveUp: "" | "attempts" | "deadline" | "budget" | "no-key" | "sign";
  /** Of the problem document. */
  code: string | null;
  advice: "same-key" | "new-key" | "never" | null;
  /** The last answer, read whole; null if the last attempt got none. */
  response: Response | null;
  error: unknown;
}

export type State = "pending" | "done" | "refused" | "unknown";

/** An action, as it is stored. */
export interface Action {
  key: string;
  lane: string;
  method: string;
  url: string;
  headers: [string, string][];
  body: string | Blob | null;
  state: State;
  reason: string;
  submittedMs: number;
  firstSentMs: number | null;
  dueMs: number;
  calls: number;
  endedMs?: number;
  answer: { status: number; headers: [string, string][]; body: string } | null;
  optimistic: { name: string; input: unknown } | null;
}

export interface Ticket {
  readonly key: string;
  /** Resolves with the action when it is no longer pending. */
  result(): Promise<Action>;
}

export interface SubmitOptions extends KeyOptions {
  /** Actions of one lane are sent in their order, each after the one before it ended. */
  lane?: string;
}

/** Dispatches "change", a CustomEvent whose detail has the key, when an action changes. */
export interface Outbox extends EventTarget {
  /** Store an action; when this resolves, a closed tab does not lose it. */
  submit(method: string, path: string, body?: Body, options?: SubmitOptions): Promise<Ticket>;
  /** Send what is pending, and what this or another tab submits from now on. */
  start(): Promise<void>;
  list(): Promise<Action[]>;
  get(key: string): Promise<Action | undefined>;
  result(key: string): Promise<Action>;
  /** The actions that were refused or are unknown, with the reason; the oldest first. */
  deadLetters(): Promise<Action[]>;
  /** Send a refused or unknown action again, with its key; false if there is none. */
  retry(key: string): Promise<boolean>;
  /** Delete a refused or unknown action, so that its lane continues; false if there is none. */
  discard(key: string): Promise<boolean>;
  /** Delete the actions that were done longer ago; by default than 7 days. */
  forget(ageMs?: number): Promise<void>;
}

export interface OptimisticFunctions<Input> {
  /** Finds the functions again after a reload. */
  name: string;
  apply: (input: Input, action: Action) => void;
  revert: (input: Input, action: Action) => void;
  confirm?: (input: Input, action: Action) => void;
}

export interface Optimistic<Input> {
  readonly name: string;
  /** Store an action and apply it; *input*, by default the body, is given to the functions. */
  submit(
    method: string,
    path: string,
    body?: Body,
    options?: SubmitOptions & { input?: Input },
  ): Promise<Ticket>;
}

export interface Client {
  readonly baseUrl: string;
  readonly outbox: Outbox;
  /** Send a request until the answer is definite; resolves with a result, also without an answer. */
  request(method: string, path: string, options?: KeyOptions & { body?: Body }): Promise<Result>;
  get(path: string, options?: KeyOptions): Promise<Result>;
  post(path: string, body?: Body, options?: KeyOptions): Promise<Result>;
  patch(path: string, body?: Body, options?: KeyOptions): Promise<Result>;
  put(path: string, body?: Body, options?: KeyOptions): Promise<Result>;
  delete(path: string, options?: KeyOptions): Promise<Result>;
  optimistic<Input = unknown>(functions: OptimisticFunctions<Input>): Optimistic<Input>;
}

export declare function createClient(options?: ClientOptions): Client;

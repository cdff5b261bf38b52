// Runs the scenarios of one client, and says on standard output how each went, one JSON object a line.
// The runner names the scenarios as arguments, the server in CLIENTS_URL and CLIENTS_KEY, and the package whose
// version is wanted in CLIENTS_PACKAGE.

import { deepStrictEqual } from "node:assert";
import { readFileSync, writeSync } from "node:fs";
import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

export const URL_ = process.env.CLIENTS_URL;
export const KEY = process.env.CLIENTS_KEY;
export const MODEL = "scripted";
export const TIMEOUT_MS = 20_000;
export const CASES = readJson("cases.json");
export const SCHEMAS = CASES.tools.schemas;

const IDLE_TIMEOUT_MS = 10_000;

class WrongAnswerError extends Error {}

// Runs those of the scenarios (name -> async function) that the command line names.
export async function run(scenarios) {
  // Clients may print; what they print is not for the runner.
  console.log = console.info = console.debug = console.error;
  say({ version: readJson(`node_modules/${process.env.CLIENTS_PACKAGE}/package.json`).version });
  for (const name of process.argv.slice(2)) {
    say({ begin: name });
    const started = performance.now();
    let error = null;
    try {
      await scenarios[name]();
    } catch (caught) {
      console.error(caught);
      error = describe(caught);
    }
    say({ end: name, error, seconds: Math.round((performance.now() - started) / 10) / 100 });
  }
  // Connections of streams that were left in the middle may keep the process.
  process.exit(0);
}

// Raises unless both are equal.
export function expect(what, got, wanted) {
  try {
    deepStrictEqual(got, wanted);
  } catch {
    throw new WrongAnswerError(`${what}: wanted ${JSON.stringify(wanted)}, got ${JSON.stringify(got)}`);
  }
}

// Raises unless `holds`.
export function expectThat(what, holds, got) {
  if (!holds) throw new WrongAnswerError(`wanted ${what}, got ${JSON.stringify(got)}`);
}

// The error of `kind` that `call` raises.
export async function expectError(kind, call) {
  let got;
  try {
    got = await call();
  } catch (error) {
    if (error instanceof kind) return error;
    throw error;
  }
  throw new WrongAnswerError(`wanted ${kind.name}, got ${JSON.stringify(got)}`);
}

// The server's /stats show that nothing runs any more.
export async function expectIdle() {
  const deadline = performance.now() + IDLE_TIMEOUT_MS;
  for (;;) {
    const response = await fetch(`${URL_}/stats`, { headers: { authorization: `Bearer ${KEY}` } });
    const stats = await response.json();
    const busy = ["active_tasks", "waiting_queue", "pages_used"].filter((key) => stats[key]);
    if (!busy.length) return;
    expectThat("an idle server after the client left", performance.now() < deadline, busy);
    await sleep(10);
  }
}

// `call` is refused twice, waits as long as it was told each time, and then gets its answer.
export async function expectRetries(call) {
  const { ask, answer, wait_s } = CASES.retries;
  const started = performance.now();
  expect("text", await call(ask + randomUUID()), answer);
  const seconds = (performance.now() - started) / 1000;
  expectThat(`at least ${wait_s} s of waiting`, seconds >= wait_s, seconds);
}

// All that an asynchronous iterable gives.
export async function collect(stream, items = []) {
  for await (const item of stream) items.push(item);
  return items;
}

// A message of the user.
export const user = (text) => ({ role: "user", content: text });

function say(fields) {
  writeSync(1, `${JSON.stringify(fields)}\n`);
}

function describe(error) {
  const lines = error.stack?.split("\n").filter((line) => !/node_modules|report\.mjs/.test(line)) ?? [];
  const where = lines.join("\n").match(/\w+\.mjs:\d+/);
  const what = error instanceof WrongAnswerError ? error.message : `${error.name}: ${error.message}`;
  return where ? `${where[0]}: ${what}` : what;
}

function readJson(path) {
  return JSON.parse(readFileSync(new URL(path, import.meta.url)));
}

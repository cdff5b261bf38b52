// The Vercel AI SDK, whatever provider it uses.

import { APICallError, generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

import {
  CASES,
  SCHEMAS,
  collect,
  expect,
  expectError,
  expectIdle,
  expectRetries,
  expectThat,
} from "./report.mjs";

const tools = Object.fromEntries(
  Object.entries(SCHEMAS).map(([name, schema]) => [name, tool({ inputSchema: jsonSchema(schema) })]),
);

const Person = z.object({ name: z.string(), age: z.number().int(), tags: z.array(z.string()) });

const callsOf = (calls) => calls.map((call) => [call.toolName, call.input]);

// Text of the parts of a stream.
const join = (parts) => parts.map((part) => (part.type === "text-delta" ? part.text : "")).join("");

export class Chat {
  // `model` answers; `stranger` is the same with a wrong key; a call of the tool `jsonTool` stands for an object.
  constructor(model, stranger, { jsonTool } = {}) {
    this.model = model;
    this.stranger = stranger;
    this.jsonTool = jsonTool;
  }

  fields(text, options) {
    return { model: this.model, prompt: text, maxRetries: 0, onError: () => {}, ...options };
  }

  ask(text, options) {
    return generateText(this.fields(text, options));
  }

  // What the stream of an answer comes to, with the names that a whole one has.
  async assemble(text, options) {
    const stream = streamText(this.fields(text, options));
    expect("streamed text", join(await collect(stream.fullStream)), await stream.text);
    return {
      text: await stream.text,
      finishReason: await stream.finishReason,
      usage: await stream.usage,
      toolCalls: await stream.toolCalls,
    };
  }

  async both(text, options) {
    return [await this.ask(text, options), await this.assemble(text, options)];
  }

  async expectAnswer(text, answer, finish, options) {
    for (const result of await this.both(text, options)) {
      expect("text", result.text, answer);
      expect("finish reason", result.finishReason, finish);
    }
  }

  // The scenarios that every provider shares.
  scenarios() {
    const names = Object.getOwnPropertyNames(Chat.prototype).filter((name) => name.startsWith("try_"));
    return Object.fromEntries(names.map((name) => [name.slice(4), () => this[name]()]));
  }

  try_text() {
    return this.expectAnswer(CASES.text.ask, CASES.text.answer, "stop");
  }

  try_emoji() {
    return this.expectAnswer(CASES.emoji.ask, CASES.emoji.answer, "stop");
  }

  try_stop() {
    const { ask: text, stop, answer } = CASES.stop;
    return this.expectAnswer(text, answer, "stop", { stopSequences: [stop] });
  }

  try_length() {
    const { ask: text, max_tokens, answer } = CASES.length;
    return this.expectAnswer(text, answer, "length", { maxOutputTokens: max_tokens });
  }

  async try_usage() {
    const { ask: text, prompt_tokens, completion_tokens } = CASES.usage;
    for (const { usage } of await this.both(text)) {
      expect("input tokens", usage.inputTokens, prompt_tokens);
      expect("output tokens", usage.outputTokens, completion_tokens);
    }
  }

  async try_tools() {
    const { ask: text, name, arguments: wanted } = CASES.tools;
    for (const result of await this.both(text, { tools })) {
      expect("calls", callsOf(result.toolCalls), [[name, wanted]]);
      expect("finish reason", result.finishReason, "tool-calls");
      expect("text", result.text, "");
    }
  }

  async try_parallel_tools() {
    const { ask: text, text: said, calls } = CASES.parallel_tools;
    for (const result of await this.both(text, { tools })) {
      expect("calls", callsOf(result.toolCalls), calls);
      expect("text", result.text.trim(), said);
    }
  }

  async try_tool_choice() {
    const { ask: text, unforced, name, arguments: wanted } = CASES.tool_choice;
    expect("text", (await this.ask(text, { tools })).text, unforced);
    for (const toolChoice of ["required", { type: "tool", toolName: name }]) {
      for (const result of await this.both(text, { tools, toolChoice })) {
        expect("calls", callsOf(result.toolCalls), [[name, wanted]]);
      }
    }
    const none = await this.ask(CASES.tools.ask, { tools, toolChoice: "none" });
    expect("calls", callsOf(none.toolCalls), []);
  }

  async try_tool_result() {
    const { ask: text, name, result, answer, arguments: wanted } = CASES.tool_result;
    const called = [];
    const execute = (input) => {
      called.push(input);
      return result;
    };
    const loop = {
      tools: { [name]: tool({ inputSchema: jsonSchema(SCHEMAS[name]), execute }) },
      stopWhen: stepCountIs(2),
    };
    expect("text", (await this.ask(text, loop)).text, answer);
    expect("streamed text", (await this.assemble(text, loop)).text, answer);
    expect("arguments", called, [wanted, wanted]);
  }

  async try_structured() {
    const { ask, answer } = CASES.structured;
    const text = this.jsonTool ? ask.replace("say:", `call:${this.jsonTool} `) : ask;
    const whole = await generateObject(this.fields(text, { schema: Person }));
    expect("object", whole.object, answer);
    const stream = streamObject(this.fields(text, { schema: Person }));
    expect("last of a stream", (await collect(stream.partialObjectStream)).at(-1), answer);
    expect("object of a stream", await stream.object, answer);
  }

  async try_refusals() {
    const { too_long, message } = CASES.refusals;
    const wrong = await expectError(APICallError, () => this.ask("hi", { topP: 2 }));
    expect("status", wrong.statusCode, 422);
    expectThat("the field in the message", wrong.message.includes("top_p"), wrong.message);
    expectThat("a request id", wrong.responseHeaders["x-request-id"], wrong.responseHeaders);
    const tooLong = await expectError(APICallError, () => this.ask("x".repeat(too_long)));
    expect("status", tooLong.statusCode, 400);
    expectThat("the limit", tooLong.message.includes(message), tooLong.message);
    const unknown = await expectError(APICallError, () => this.ask("hi", { model: this.stranger }));
    expect("status", unknown.statusCode, 401);
  }

  async try_fault() {
    const { ask: text, begun } = CASES.fault;
    const refused = await expectError(APICallError, () => this.ask(text));
    expect("status", refused.statusCode, 500);
    const parts = await collect(streamText(this.fields(text)).fullStream);
    expect("text before the error", join(parts), begun);
    expect("errors", parts.filter((part) => part.type === "error").length, 1);
  }

  async try_cancel() {
    const controller = new AbortController();
    const fields = { abortSignal: controller.signal, maxOutputTokens: 3500 };
    const stream = streamText(this.fields(CASES.cancel.ask, fields));
    for await (const part of stream.fullStream) if (part.type === "text-delta") break;
    controller.abort();
    await expectIdle();
  }

  try_retries() {
    return expectRetries(async (text) => (await this.ask(text, { maxRetries: 2 })).text);
  }
}

// An object without a schema.
export async function expectJson(chat) {
  const { ask: text, answer } = CASES.json_mode;
  const { object } = await generateObject(chat.fields(text, { output: "no-schema" }));
  expect("object", object, answer);
}

// Text that goes on where a prompt ends.
export async function expectCompletion(chat, model) {
  const { ask: text, answer, max_tokens } = CASES.completions;
  for (const result of await chat.both(text, { model, maxOutputTokens: max_tokens })) {
    expect("text", result.text, answer);
  }
}

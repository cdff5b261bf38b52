// @anthropic-ai/sdk.

import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

import {
  CASES,
  KEY,
  MODEL,
  SCHEMAS,
  TIMEOUT_MS,
  URL_,
  collect,
  expect,
  expectError,
  expectIdle,
  expectRetries,
  expectThat,
  run,
  user,
} from "./report.mjs";

const client = new Anthropic({ baseURL: URL_, apiKey: KEY, maxRetries: 0, timeout: TIMEOUT_MS });

const tools = Object.entries(SCHEMAS).map(([name, input_schema]) => ({ name, input_schema }));

const Person = z.object({ name: z.string(), age: z.number().int(), tags: z.array(z.string()) });

const body = (text, fields) => ({ model: MODEL, max_tokens: 512, messages: [user(text)], ...fields });
const ask = (text, fields) => client.messages.create(body(text, fields));
const textOf = (message) => message.content.map((block) => block.text ?? "").join("");
const callsOf = (message) =>
  message.content.filter((block) => block.type === "tool_use").map((block) => [block.name, block.input]);

// The message that the stream helper puts together.
const assemble = (text, fields) => client.messages.stream(body(text, fields)).finalMessage();

const both = async (text, fields) => [await ask(text, fields), await assemble(text, fields)];

async function expectAnswer(text, answer, reason, sequence, fields) {
  for (const message of await both(text, fields)) {
    expect("text", textOf(message), answer);
    expect("stop reason", [message.stop_reason, message.stop_sequence], [reason, sequence]);
  }
}

await run({
  async models() {
    const models = await collect(client.models.list());
    expect("models", models.map((model) => model.id), [MODEL]);
    expect("model", (await client.models.retrieve(MODEL)).id, MODEL);
  },

  text: () => expectAnswer(CASES.text.ask, CASES.text.answer, "end_turn", null),

  emoji: () => expectAnswer(CASES.emoji.ask, CASES.emoji.answer, "end_turn", null),

  prefill() {
    const { ask: text, begun, answer } = CASES.prefill;
    const messages = [user(text), { role: "assistant", content: begun }];
    return expectAnswer(text, answer, "end_turn", null, { messages });
  },

  stop() {
    const { ask: text, stop, answer } = CASES.stop;
    return expectAnswer(text, answer, "stop_sequence", stop, { stop_sequences: [stop] });
  },

  length() {
    const { ask: text, max_tokens, answer } = CASES.length;
    return expectAnswer(text, answer, "max_tokens", null, { max_tokens });
  },

  async usage() {
    const { ask: text, prompt_tokens, completion_tokens } = CASES.usage;
    for (const { usage } of await both(text)) {
      expect("input tokens", usage.input_tokens + usage.cache_read_input_tokens, prompt_tokens);
      expect("output tokens", usage.output_tokens, completion_tokens);
    }
  },

  async count_tokens() {
    const { ask: text, prompt_tokens } = CASES.usage;
    const count = await client.messages.countTokens({ model: MODEL, messages: [user(text)] });
    expect("input tokens", count.input_tokens, prompt_tokens);
  },

  async tools() {
    const { ask: text, name, arguments: wanted } = CASES.tools;
    for (const message of await both(text, { tools })) {
      expect("calls", callsOf(message), [[name, wanted]]);
      expect("stop reason", message.stop_reason, "tool_use");
    }
  },

  async parallel_tools() {
    const { ask: text, text: said, calls } = CASES.parallel_tools;
    for (const message of await both(text, { tools })) {
      expect("calls", callsOf(message), calls);
      expect("text", textOf(message).trim(), said);
    }
    const single = await ask(text, { tools, tool_choice: { type: "auto", disable_parallel_tool_use: true } });
    expect("one call", callsOf(single), calls.slice(0, 1));
  },

  async tool_choice() {
    const { ask: text, unforced, name, arguments: wanted } = CASES.tool_choice;
    expect("text", textOf(await ask(text, { tools })), unforced);
    for (const tool_choice of [{ type: "any" }, { type: "tool", name }]) {
      for (const message of await both(text, { tools, tool_choice })) {
        expect("calls", callsOf(message), [[name, wanted]]);
      }
    }
    const none = await ask(CASES.tools.ask, { tools, tool_choice: { type: "none" } });
    expect("calls", callsOf(none), []);
  },

  async tool_result() {
    const { ask: text, result, answer } = CASES.tool_result;
    const message = await ask(text, { tools });
    const call = message.content.find((block) => block.type === "tool_use");
    const messages = [
      user(text),
      { role: "assistant", content: message.content },
      user([{ type: "tool_result", tool_use_id: call.id, content: result }]),
    ];
    expect("text", textOf(await ask("", { messages, tools })), answer);
  },

  async structured() {
    const { ask: text, answer } = CASES.structured;
    const fields = { output_config: { format: zodOutputFormat(Person) } };
    const whole = await client.messages.parse(body(text, fields));
    expect("parsed", whole.parsed_output, answer);
    expect("parsed from a stream", (await assemble(text, fields)).parsed_output, answer);
  },

  async refusals() {
    const { max_tokens, field, too_long, message } = CASES.refusals;
    const wrong = await expectError(Anthropic.UnprocessableEntityError, () => ask("hi", { max_tokens }));
    expectThat("the field in the message", wrong.message.includes(field), wrong.message);
    expectThat("a request id", wrong.requestID, wrong.requestID);
    const tooLong = await expectError(Anthropic.BadRequestError, () =>
      ask("x".repeat(too_long), { stream: true }),
    );
    expectThat("the limit", tooLong.message.includes(message), tooLong.message);
    await expectError(Anthropic.NotFoundError, () => client.models.retrieve("other"));
    const stranger = client.withOptions({ apiKey: "wrong" });
    await expectError(Anthropic.AuthenticationError, () => stranger.models.list());
  },

  async fault() {
    const { ask: text, begun } = CASES.fault;
    await expectError(Anthropic.InternalServerError, () => ask(text));
    const events = [];
    await expectError(Anthropic.APIError, async () => collect(await ask(text, { stream: true }), events));
    expect("text before the error", events.map((event) => event.delta?.text ?? "").join(""), begun);
  },

  async cancel() {
    const stream = await ask(CASES.cancel.ask, { stream: true, max_tokens: 3500 });
    for await (const event of stream) if (event.type === "content_block_delta") break;
    await expectIdle();
  },

  retries: () =>
    expectRetries(async (text) => textOf(await client.messages.create(body(text), { maxRetries: 2 }))),
});

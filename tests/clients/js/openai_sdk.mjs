// openai-node.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
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

const client = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: KEY, maxRetries: 0, timeout: TIMEOUT_MS });

const tools = Object.entries(SCHEMAS).map(([name, parameters]) => ({
  type: "function",
  function: { name, parameters },
}));

const Person = z.object({ name: z.string(), age: z.number().int(), tags: z.array(z.string()) });

const body = (text, fields) => ({ model: MODEL, messages: [user(text)], ...fields });
const ask = (text, fields) => client.chat.completions.create(body(text, fields));
const join = (chunks) => chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
const finishOf = (chunks) => chunks.map((chunk) => chunk.choices[0]?.finish_reason).filter(Boolean);
const callsOf = (message) =>
  (message.tool_calls ?? []).map((call) => [call.function.name, JSON.parse(call.function.arguments)]);

// The message that the stream helper puts together.
const assemble = (text, fields) => client.chat.completions.stream(body(text, fields)).finalMessage();

async function expectAnswer(text, answer, finish, fields) {
  const whole = await ask(text, fields);
  expect("text", whole.choices[0].message.content, answer);
  expect("finish reason", whole.choices[0].finish_reason, finish);
  const chunks = await collect(await ask(text, { stream: true, ...fields }));
  expect("streamed text", join(chunks), answer);
  expect("streamed finish reason", finishOf(chunks), [finish]);
}

function expectLogprobs(entries) {
  const { answer, num_tokens, top } = CASES.logprobs;
  expect("tokens", entries.length, num_tokens);
  expect("bytes", Buffer.from(entries.flatMap((entry) => entry.bytes)).toString(), answer);
  for (const entry of entries) {
    expectThat("a log-probability", entry.logprob <= 0, entry.logprob);
    expect("alternatives", entry.top_logprobs.length, top);
  }
}

await run({
  async models() {
    const models = await collect(client.models.list());
    expect("models", models.map((model) => model.id), [MODEL]);
    expect("model", (await client.models.retrieve(MODEL)).id, MODEL);
  },

  text: () => expectAnswer(CASES.text.ask, CASES.text.answer, "stop"),

  emoji: () => expectAnswer(CASES.emoji.ask, CASES.emoji.answer, "stop"),

  stop: () => expectAnswer(CASES.stop.ask, CASES.stop.answer, "stop", { stop: CASES.stop.stop }),

  length: () =>
    expectAnswer(CASES.length.ask, CASES.length.answer, "length", {
      max_completion_tokens: CASES.length.max_tokens,
    }),

  async usage() {
    const { ask: text, prompt_tokens, completion_tokens } = CASES.usage;
    const options = { stream: true, stream_options: { include_usage: true } };
    const chunks = await collect(await ask(text, options));
    for (const usage of [(await ask(text)).usage, chunks.at(-1).usage]) {
      expect("prompt tokens", usage.prompt_tokens, prompt_tokens);
      expect("completion tokens", usage.completion_tokens, completion_tokens);
      expect("total tokens", usage.total_tokens, prompt_tokens + completion_tokens);
    }
  },

  async choices() {
    const { ask: text, answer } = CASES.choices;
    const whole = await ask(text, { n: 2 });
    expect("choices", whole.choices.map((choice) => [choice.index, choice.message.content]), [
      [0, answer],
      [1, answer],
    ]);
    const streamed = await client.chat.completions.stream(body(text, { n: 2 })).finalChatCompletion();
    expect("streamed choices", streamed.choices.map((choice) => choice.message.content), [answer, answer]);
  },

  async logprobs() {
    const { ask: text, top } = CASES.logprobs;
    const fields = { logprobs: true, top_logprobs: top };
    expectLogprobs((await ask(text, fields)).choices[0].logprobs.content);
    const chunks = await collect(await ask(text, { stream: true, ...fields }));
    expectLogprobs(chunks.flatMap((chunk) => chunk.choices[0]?.logprobs?.content ?? []));
  },

  async completions() {
    const { prompt, answer, max_tokens } = CASES.completions;
    const fields = { model: MODEL, prompt, max_tokens };
    const whole = await client.completions.create(fields);
    expect("text", whole.choices[0].text, answer);
    const chunks = await collect(await client.completions.create({ ...fields, stream: true }));
    expect("streamed text", chunks.map((chunk) => chunk.choices[0]?.text ?? "").join(""), answer);
    const [echoed] = (await client.completions.create({ ...fields, echo: true, logprobs: 1 })).choices;
    expect("echo", echoed.text, prompt + answer);
    expect("tokens", echoed.logprobs.tokens.join(""), prompt + answer);
    expect("first log-probability", echoed.logprobs.token_logprobs[0], null);
  },

  async tools() {
    const { ask: text, name, arguments: wanted } = CASES.tools;
    const whole = (await ask(text, { tools })).choices[0];
    expect("calls", callsOf(whole.message), [[name, wanted]]);
    expect("finish reason", whole.finish_reason, "tool_calls");
    expect("streamed calls", callsOf(await assemble(text, { tools })), [[name, wanted]]);
  },

  async parallel_tools() {
    const { ask: text, text: said, calls } = CASES.parallel_tools;
    for (const message of [(await ask(text, { tools })).choices[0].message, await assemble(text, { tools })]) {
      expect("calls", callsOf(message), calls);
      expect("text", message.content.trim(), said);
    }
    const single = await ask(text, { tools, parallel_tool_calls: false });
    expect("one call", callsOf(single.choices[0].message), calls.slice(0, 1));
  },

  async tool_choice() {
    const { ask: text, unforced, name, arguments: wanted } = CASES.tool_choice;
    expect("text", (await ask(text, { tools })).choices[0].message.content, unforced);
    for (const tool_choice of ["required", { type: "function", function: { name } }]) {
      const forced = (await ask(text, { tools, tool_choice })).choices[0].message;
      expect("calls", callsOf(forced), [[name, wanted]]);
      expect("streamed calls", callsOf(await assemble(text, { tools, tool_choice })), [[name, wanted]]);
    }
    const none = (await ask(CASES.tools.ask, { tools, tool_choice: "none" })).choices[0];
    expect("calls", callsOf(none.message), []);
  },

  async tool_result() {
    const { ask: text, name, result, answer } = CASES.tool_result;
    const called = [];
    const runner = client.chat.completions.runTools(
      body(text, {
        tools: [
          {
            type: "function",
            function: {
              name,
              parameters: SCHEMAS[name],
              parse: JSON.parse,
              function: (args) => {
                called.push(args);
                return result;
              },
            },
          },
        ],
      }),
    );
    expect("text", await runner.finalContent(), answer);
    expect("arguments", called, [CASES.tool_result.arguments]);
  },

  async json_mode() {
    const { ask: text, answer } = CASES.json_mode;
    const whole = await ask(text, { response_format: { type: "json_object" } });
    expect("object", JSON.parse(whole.choices[0].message.content), answer);
  },

  async structured() {
    const { ask: text, answer } = CASES.structured;
    const fields = { response_format: zodResponseFormat(Person, "person") };
    const whole = await client.chat.completions.parse(body(text, fields));
    expect("parsed", whole.choices[0].message.parsed, answer);
    expect("parsed from a stream", (await assemble(text, fields)).parsed, answer);
  },

  async refusals() {
    const { max_tokens, field, too_long, message } = CASES.refusals;
    const wrong = await expectError(OpenAI.UnprocessableEntityError, () => ask("hi", { max_tokens }));
    expectThat("the field in the message", wrong.message.includes(field), wrong.message);
    expect("param", wrong.param, "max_tokens");
    expectThat("a request id", wrong.requestID, wrong.requestID);
    const tooLong = await expectError(OpenAI.BadRequestError, () =>
      ask("x".repeat(too_long), { stream: true }),
    );
    expect("code", tooLong.code, "context_length_exceeded");
    expectThat("the limit", tooLong.message.includes(message), tooLong.message);
    await expectError(OpenAI.NotFoundError, () => client.models.retrieve("other"));
    const stranger = client.withOptions({ apiKey: "wrong" });
    await expectError(OpenAI.AuthenticationError, () => stranger.models.list());
  },

  async fault() {
    const { ask: text, begun } = CASES.fault;
    await expectError(OpenAI.InternalServerError, () => ask(text));
    const chunks = [];
    const error = await expectError(OpenAI.APIError, async () =>
      collect(await ask(text, { stream: true }), chunks),
    );
    expect("text before the error", join(chunks), begun);
    expect("type", error.type, "api_error");
  },

  async cancel() {
    const stream = await ask(CASES.cancel.ask, { stream: true, max_tokens: 3500 });
    for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
    await expectIdle();
  },

  retries: () =>
    expectRetries(async (text) => {
      const answer = await client.chat.completions.create(body(text), { maxRetries: 2 });
      return answer.choices[0].message.content;
    }),
});

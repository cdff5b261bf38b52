// The Vercel AI SDK with @ai-sdk/anthropic.

import { createAnthropic } from "@ai-sdk/anthropic";

import { Chat } from "./ai_chat.mjs";
import { CASES, KEY, MODEL, URL_, expect, run, user } from "./report.mjs";

const connect = (apiKey) => createAnthropic({ baseURL: `${URL_}/v1`, apiKey });
const chat = new Chat(connect(KEY)(MODEL), connect("wrong")(MODEL), { jsonTool: "json" });

await run({
  ...chat.scenarios(),

  async prefill() {
    const { ask: text, begun, answer } = CASES.prefill;
    const messages = [user(text), { role: "assistant", content: begun }];
    const options = { prompt: undefined, messages };
    for (const result of await chat.both("", options)) expect("text", result.text, answer);
  },
});

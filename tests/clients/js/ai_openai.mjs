// The Vercel AI SDK with @ai-sdk/openai.

import { createOpenAI } from "@ai-sdk/openai";

import { Chat, expectCompletion, expectJson } from "./ai_chat.mjs";
import { CASES, KEY, MODEL, URL_, expect, run } from "./report.mjs";

const connect = (apiKey) => createOpenAI({ baseURL: `${URL_}/v1`, apiKey });
const provider = connect(KEY);
const chat = new Chat(provider.chat(MODEL), connect("wrong").chat(MODEL));

await run({
  ...chat.scenarios(),

  async logprobs() {
    const { ask: text, num_tokens, top } = CASES.logprobs;
    const { providerMetadata } = await chat.ask(text, { providerOptions: { openai: { logprobs: top } } });
    expect("tokens", providerMetadata.openai.logprobs.length, num_tokens);
    const alternatives = providerMetadata.openai.logprobs.map((entry) => entry.top_logprobs.length);
    expect("alternatives", alternatives, Array(num_tokens).fill(top));
  },

  completions: () => expectCompletion(chat, provider.completion(MODEL)),
  json_mode: () => expectJson(chat),
});

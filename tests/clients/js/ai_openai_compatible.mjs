// The Vercel AI SDK with @ai-sdk/openai-compatible.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

import { Chat, expectCompletion, expectJson } from "./ai_chat.mjs";
import { KEY, MODEL, URL_, run } from "./report.mjs";

const connect = (apiKey) =>
  createOpenAICompatible({
    name: "astrai",
    baseURL: `${URL_}/v1`,
    apiKey,
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
const provider = connect(KEY);
const chat = new Chat(provider.chatModel(MODEL), connect("wrong").chatModel(MODEL));

await run({
  ...chat.scenarios(),
  completions: () => expectCompletion(chat, provider.completionModel(MODEL)),
  json_mode: () => expectJson(chat),
});

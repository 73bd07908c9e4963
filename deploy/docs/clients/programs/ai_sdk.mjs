import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import { MODEL, URL_, attempt } from "./report.mjs";

const provider = createOpenAICompatible({ name: "nsm", baseURL: `${URL_}/v1`, apiKey: "none", includeUsage: true });
const options = { model: provider(MODEL), prompt: "Where does the captain live?", maxOutputTokens: 8 };

await attempt("generateText", async () => (await generateText(options)).text);
await attempt("streamText", async () => {
  let text = "";
  for await (const part of streamText(options).textStream) text += part;
  return text;
});
await attempt("usage", async () => (await generateText(options)).usage.outputTokens > 0);

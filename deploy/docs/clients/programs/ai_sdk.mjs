import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, streamText, tool } from "ai";
import { MODEL, SCHEMA, URL_, attempt, isPerson } from "./report.mjs";

const provider = createOpenAICompatible({
  name: "nsm",
  baseURL: `${URL_}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const options = { model: provider(MODEL), prompt: "Where does the captain live?", maxOutputTokens: 8 };
const long = { ...options, maxOutputTokens: 200, seed: 1, maxRetries: 0 };
const schema = jsonSchema(SCHEMA);

await attempt("generateText", async () => (await generateText(options)).text);
await attempt("streamText", async () => {
  let text = "";
  for await (const part of streamText(options).textStream) text += part;
  return text;
});
await attempt("usage", async () => (await generateText(options)).usage.outputTokens > 0);
await attempt("JSON schema", async () => isPerson((await generateText({ ...long, output: Output.object({ schema }) })).output));
const tools = { look: tool({ description: "Looks for a person.", inputSchema: schema }) };
await attempt("tools", async () => {
  const [call] = (await generateText({ ...long, tools, toolChoice: "required" })).toolCalls;
  return call.toolName === "look" && isPerson(call.input);
});
await attempt("streamed tools", async () => {
  let call = null;
  for await (const part of streamText({ ...long, tools, toolChoice: "required" }).fullStream) {
    if (part.type === "tool-call") call ??= part;
  }
  return call.toolName === "look" && isPerson(call.input);
});

import OpenAI from "openai";
import { MODEL, SCHEMA, URL_, attempt, isPerson } from "./report.mjs";

const client = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: "none" });
const messages = [{ role: "user", content: "Where does the captain live?" }];

await attempt("chat", async () => (await client.chat.completions.create({ model: MODEL, messages, max_completion_tokens: 8 })).choices[0].message.content);
await attempt("streamed chat", async () => {
  let text = "";
  for await (const part of await client.chat.completions.create({ model: MODEL, messages, max_completion_tokens: 8, stream: true })) {
    text += part.choices[0]?.delta?.content ?? "";
  }
  return text;
});
const long = { model: MODEL, messages, max_completion_tokens: 200, seed: 1 };
await attempt("JSON schema", async () => {
  const response_format = { type: "json_schema", json_schema: { name: "person", schema: SCHEMA, strict: true } };
  const answer = await client.chat.completions.create({ ...long, response_format });
  return isPerson(JSON.parse(answer.choices[0].message.content));
});
await attempt("tools", async () => {
  const tools = [{ type: "function", function: { name: "look", parameters: SCHEMA } }];
  const answer = await client.chat.completions.create({ ...long, tools, tool_choice: "required" });
  const [call] = answer.choices[0].message.tool_calls;
  return call.function.name === "look" && isPerson(JSON.parse(call.function.arguments));
});
await attempt("chained responses", async () => {
  const first = await client.responses.create({ model: MODEL, input: "Hello", max_output_tokens: 16 });
  const second = await client.responses.create({ model: MODEL, input: "And?", previous_response_id: first.id, max_output_tokens: 16 });
  return second.usage.input_tokens_details.cached_tokens > 0;
});
await attempt("streamed response", async () => {
  let end = null;
  for await (const event of await client.responses.create({ model: MODEL, input: "Hello", max_output_tokens: 16, stream: true })) end = event.type;
  return end === "response.completed" || end === "response.incomplete";
});

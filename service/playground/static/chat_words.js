// The words that the model's chat template puts around messages, so that a chat can be read out of a token log again.

import { modelOf } from "./models.js";

const [SYSTEM, QUESTION, ANSWER, NEXT] = ["a-rule-1618", "a-question-2718", "an-answer-3141", "another-2236"];

/** Of the model of a session: {first, system, later}: each the texts around the contents of its messages. */
export async function readChatWords(api, head) {
  const question = { role: "user", content: QUESTION };
  const chats = [[question], [{ role: "system", content: SYSTEM }, question], [question, { role: "assistant", content: ANSWER }, { role: "user", content: NEXT }]];
  const [first, system, later] = await Promise.all(chats.map((messages) => render(api, head, messages).catch(() => null)));
  return {
    first: first?.split(QUESTION) ?? null,
    system: system?.split(new RegExp(`${SYSTEM}|${QUESTION}`)) ?? null,
    later: later?.split(ANSWER)[1]?.split(NEXT) ?? null,
  };
}

async function render(api, head, messages) {
  const { tokens } = await api.json("POST", "tokenize", { messages, add_special_tokens: false, ...modelOf(head) });
  return (await api.json("POST", "detokenize", { tokens, ...modelOf(head) })).prompt;
}

/** The messages in what a turn has read, or null where it is no chat in these words. `isFirst`: of its session. */
export function messagesOf(words, text, isFirst) {
  if (!isFirst) return fitted(words.later, text, ["user"]);
  return fitted(words.first, text, ["user"]) ?? fitted(words.system, text, ["system", "user"]);
}

function fitted(around, text, roles) {
  if (around?.length !== roles.length + 1) return null;
  const [begin, end] = [around[0], around.at(-1)];
  if (!text.startsWith(begin) || !text.endsWith(end) || text.length < begin.length + end.length) return null;
  const inner = text.slice(begin.length, text.length - end.length);
  if (roles.length === 1) return [{ role: roles[0], content: inner }];
  const middle = inner.indexOf(around[1]);
  if (middle < 0) return null;
  return [{ role: roles[0], content: inner.slice(0, middle) }, { role: roles[1], content: inner.slice(middle + around[1].length) }];
}

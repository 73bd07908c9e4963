// Where a chat's log has the answer before a turn. A turn of a template that drops thoughts has read that answer again without
// its thought, so the log has no version any more that ends with it.

import { sessionPath } from "./api.js";
import { readChatWords } from "./chat_words.js";
import { modelOf } from "./models.js";
import { decode, readLog } from "./session_log.js";

/** Back to the end of the turn before, at `version`, or to the same answer without its thought. Resolves to the new head. */
export async function rewindToAnswer(api, head, turn, version) {
  const rewind = (place) => api.json("POST", sessionPath(head.id, "rewind"), { ...place, expected_version: head.version });
  try {
    return await rewind({ to_version: version });
  } catch (error) {
    const position = error.param === "to_version" && turn.messages ? await endOfAnswer(api, head, turn, version) : null;
    if (position === null) throw error;
    return rewind({ to_position: position });
  }
}

/** The tokens before the turn's newest message: what it read begins with the answer. null: there is no such message. */
async function endOfAnswer(api, head, turn, version) {
  const { header, ids } = await readLog(api, head.id);
  const start = header.marks.filter(([own]) => own < version).at(-1)?.[1] ?? 0;
  const read = ids.slice(start, turn.promptTokens);
  const [text, words] = await Promise.all([decode(api, head, read), readChatWords(api, head)]);
  const end = words.later === null ? -1 : text.lastIndexOf(words.later[0]);
  return end < 0 ? null : start + (await numTokens(api, head, read, end));
}

/** How many of `ids` fit in so many characters. */
async function numTokens(api, head, ids, numCharacters) {
  let [least, most] = [0, ids.length];
  while (least < most) {
    const middle = Math.ceil((least + most) / 2);
    if ((await decode(api, head, ids.slice(0, middle))).length <= numCharacters) least = middle;
    else most = middle - 1;
  }
  return least;
}

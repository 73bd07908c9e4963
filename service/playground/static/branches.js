// Where two conversations part.

import { count } from "./format.js";

/**
 * Where two lists of turns differ first: `turn` (how many are the same before it) and `chars` (how much of its answers is;
 * null when its inputs differ). Null when one list is the beginning of the other.
 */
export function partingOf(left, right) {
  const turn = numSame(left, right);
  if (turn === left.length || turn === right.length) return null;
  if (left[turn].input !== right[turn].input) return { turn, chars: null };
  return { turn, chars: commonChars(textOf(left[turn]), textOf(right[turn])) };
}

/** The same in one sentence. */
export function compareBranches(left, right) {
  const same = numSame(left, right);
  const agreed = same === 0 ? "" : `The same for ${count(same, "turn")}`;
  if (same === left.length && same === right.length) return same === 0 ? "Nothing to compare yet." : `${agreed}.`;
  const parting = partingOf(left, right);
  if (parting === null) {
    const longer = same === left.length ? "right" : "left";
    return same === 0 ? `Only the ${longer} one has turns.` : `${agreed}; then only the ${longer} one goes on.`;
  }
  const begin = same === 0 ? "They part" : `${agreed}; they part`;
  if (parting.chars === null) return `${begin} at the input of turn ${same + 1}.`;
  return `${begin} in the answer of turn ${same + 1}, after ${count(parting.chars, "character")}.`;
}

export function textOf(turn) {
  return turn.pieces.map((piece) => piece.text).join("");
}

/** The index of the piece that holds a character. */
export function pieceAt(turn, chars) {
  let end = 0;
  return turn.pieces.findIndex((piece) => (end += piece.text.length) > chars);
}

function numSame(left, right) {
  let same = 0;
  while (same < left.length && same < right.length && isSame(left[same], right[same])) same += 1;
  return same;
}

function isSame(one, other) {
  return one.input === other.input && textOf(one) === textOf(other);
}

function commonChars(one, other) {
  let length = 0;
  while (length < one.length && one[length] === other[length]) length += 1;
  return length;
}

// Where two conversations part.

import { count } from "./format.js";

/** One sentence about two lists of turns. */
export function compareBranches(left, right) {
  let same = 0;
  while (same < left.length && same < right.length && isSame(left[same], right[same])) same += 1;
  const agreed = same === 0 ? "" : `The same for ${count(same, "turn")}`;
  if (same === left.length && same === right.length) return same === 0 ? "Nothing to compare yet." : `${agreed}.`;
  if (same === left.length || same === right.length) {
    const longer = same === left.length ? "right" : "left";
    return same === 0 ? `Only the ${longer} one has turns.` : `${agreed}; then only the ${longer} one goes on.`;
  }
  const begin = same === 0 ? "They part" : `${agreed}; they part`;
  if (left[same].input !== right[same].input) return `${begin} at the input of turn ${same + 1}.`;
  return `${begin} in the answer of turn ${same + 1}, after ${JSON.stringify(lastCommon(left[same], right[same]))}.`;
}

function isSame(one, other) {
  return one.input === other.input && textOf(one) === textOf(other);
}

export function textOf(turn) {
  return turn.pieces.map((piece) => piece.text).join("");
}

// The last words before the difference, so that a person finds the place.
function lastCommon(one, other) {
  const [left, right] = [Array.from(textOf(one)), Array.from(textOf(other))];
  let length = 0;
  while (length < left.length && left[length] === right[length]) length += 1;
  return left.slice(Math.max(0, length - 24), length).join("");
}

// Which sessions are open, in the address's fragment: #s=… and, beside it, &beside=…. So a conversation can be linked,
// bookmarked and gone back to; the fragment is never sent to the server.

/** The ids of the left and the right pane, each null where there is none; null when the address names none at all. */
export function idsInAddress() {
  const named = new URLSearchParams(location.hash.slice(1));
  const ids = [named.get("s"), named.get("beside")].map((id) => id || null);
  return ids.every((id) => id === null) ? null : ids;
}

/** `isStep`: whether *back* leads to the address as it was. */
export function showInAddress([left, right], { isStep }) {
  const named = new URLSearchParams();
  if (left !== null) named.set("s", left);
  if (right !== null) named.set("beside", right);
  const fragment = named.size === 0 ? "" : `#${named}`;
  if (fragment === location.hash) return;
  const url = fragment || location.pathname + location.search;
  if (isStep) history.pushState(null, "", url);
  else history.replaceState(null, "", url);
}

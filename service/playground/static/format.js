// Numbers and tokens as a person reads them.

const RELATIVE = new Intl.RelativeTimeFormat("en", { numeric: "auto", style: "short" });
/** Who speaks in a chat, in the page's words. */
export const ROLES = { system: "System", user: "You", assistant: "Model" };

const UNITS = [["day", 86400], ["hour", 3600], ["minute", 60]];

/** A probability: never 0 % or 100 % by rounding. */
export function percent(probability) {
  const value = probability * 100;
  if (value < 0.01) return "< 0.01 %";
  if (value < 1) return `${value.toFixed(2)} %`;
  return value > 99.9 ? "> 99.9 %" : `${value.toFixed(1)} %`;
}

/** Levels of surprise, for colours and underlines: 0 is the expected token. */
export const LEVELS = [
  [0.5, "50 % and more"],
  [0.2, "20 to 50 %"],
  [0.05, "5 to 20 %"],
  [0.01, "1 to 5 %"],
  [0, "below 1 %"],
];

export function levelOf(probability) {
  return LEVELS.findIndex(([least]) => probability >= least);
}

export function seconds(value) {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`;
}

export function joules(value) {
  return value < 1 ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} mJ` : `${value.toFixed(2)} J`;
}

export function bytes(value) {
  return value < 1e6 ? `${(value / 1e3).toFixed(1)} kB` : `${(value / 1e6).toFixed(2)} MB`;
}

export function count(value, one, many = `${one}s`) {
  return `${value.toLocaleString("en")} ${value === 1 ? one : many}`;
}

export function millions(value) {
  return value < 1e6 ? value.toLocaleString("en") : `${(value / 1e6).toFixed(1)} M`;
}

/** `at`: Unix seconds. */
export function ago(at) {
  const passed = Date.now() / 1000 - at;
  for (const [unit, length] of UNITS) {
    if (passed >= length) return RELATIVE.format(-Math.floor(passed / length), unit);
  }
  return "just now";
}

const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/** A text as it is drawn: what would be invisible, or turn the order of the letters about, is a symbol instead. */
export function harmless(text) {
  return text.replace(CONTROLS, (control) => {
    const code = control.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code); // ␀ and its like
    return code === 0x7f ? "␡" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** A token with its blanks to be seen. */
export function visible(text) {
  return harmless(text).replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(no text)";
}

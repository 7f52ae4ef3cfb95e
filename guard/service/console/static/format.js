// Numbers as people read them. Three digits, units next to them, "–" for nothing.

/** A duration: `1.23 s`, `45.6 ms`, `789 µs`. */
export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  // By what it is once rounded: 0.9999 s is "1.00 s", not "1000 ms".
  const [scale, unit] = size >= 0.9995 ? [1, "s"] : size >= 0.9995e-3 ? [1e3, "ms"] : [1e6, "µs"];
  const scaled = value * scale;
  const digits = Math.abs(scaled) >= 99.95 ? 0 : Math.abs(scaled) >= 9.995 ? 1 : 2;
  return `${scaled.toFixed(digits)} ${unit}`;
}

/** A tick of an axis: no more digits than it needs. */
export function tick(value) {
  if (value === 0) return "0";
  const [scale, unit] = value >= 1 ? [1, "s"] : value >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${Number((value * scale).toPrecision(3))} ${unit}`;
}

/** Time that is left or gone, coarse. */
export function coarse(value) {
  if (value === null || value === undefined) return "no end";
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (value >= size) return `${Number((value / size).toFixed(value / size < 10 ? 1 : 0))} ${unit}`;
  }
  return `${Math.round(value)} s`;
}

/** A share in percent. */
export const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`);

/** A whole number with thin spaces. */
export const count = (value) => Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, " ");

/** Bytes with a binary unit. */
export function bytes(value) {
  if (!value) return "–";
  const power = Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${Number((value / 1024 ** power).toPrecision(3))} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/** The time of day of a Date, in the reader's zone. */
export const clock = (date) => date.toLocaleTimeString([], { hour12: false });

/** Seconds of `90`, `90s`, `10m`, `2h`, `1d`; null when it is none of these. */
export function duration(text) {
  const found = /^\s*(\d+(?:\.\d+)?)\s*(s|m|min|h|d|)\s*$/.exec(text);
  if (!found || Number(found[1]) <= 0) return null;
  return Number(found[1]) * { "": 1, s: 1, m: 60, min: 60, h: 3600, d: 86400 }[found[2]];
}

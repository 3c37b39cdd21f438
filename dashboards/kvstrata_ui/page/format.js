// Numbers as people read them, by Grafana's names of units, and axes that end at round numbers. Pure.

const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const DECIMAL = ["", "K", "M", "G", "T"];
const TIMES = [[86400, "d"], [3600, "h"], [120, "min", 60], [1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
const MOMENTS = [60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000, 2592000, 8640000];
const ROUND = [1, 2, 2.5, 5, 10];
export const UNITS = ["short", "bytes", "binBps", "s", "percentunit", "cps"];

/** A value with its unit, in at most three significant digits; `-` where there is no number. */
export function text(value, unit) {
  if (!Number.isFinite(value)) return value === Infinity ? "∞" : "-";
  switch (unit) {
    case "bytes": return scaled(value, BINARY, 1024);
    case "binBps": return `${scaled(value, BINARY, 1024)}/s`;
    case "s": return time(value);
    case "percentunit": return `${short(value * 100)} %`;
    case "cps": return `${scaled(value, DECIMAL, 1000)}/s`;
    case "short": return scaled(value, DECIMAL, 1000);
    default: throw new Error(`unit ${unit} is not known here`);
  }
}

/** Round numbers from `low` to at least `high`; sizes in bytes are round in binary. */
export function ticks(low, high, unit, count = 4) {
  const rough = (high - low) / count;
  if (!(rough > 1e-300)) return [low, low + 1];
  const step = roundStep(rough * 0.999, unit);
  const first = Math.floor(low / step + 1e-9);
  return Array.from({ length: Math.ceil(high / step - 1e-9) - first + 1 }, (_, i) => (first + i) * step);
}

/** The smallest round number from `least` on: of bytes a power of two, of long times minutes, hours and days. */
function roundStep(least, unit) {
  if (least > 1 && (unit === "bytes" || unit === "binBps")) return 2 ** Math.ceil(Math.log2(least));
  const time = unit === "s" && least > 30 ? MOMENTS.find((one) => one >= least) : undefined;
  if (time) return time;
  const magnitude = 10 ** Math.floor(Math.log10(least));
  return ROUND.find((one) => one * magnitude >= least) * magnitude;
}

/** The number that Prometheus wrote. */
export function number(written) {
  return written === "+Inf" ? Infinity : written === "-Inf" ? -Infinity : Number(written);
}

/** A moment of the day; with its day where that is not today's. */
export function clock(second, isLong = false) {
  const at = new Date(second * 1000);
  const time = at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...(isLong && { second: "2-digit" }), hour12: false });
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString([], { month: "short", day: "numeric" })} ${time}`;
}

function short(value) {
  if (value === 0) return "0";
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
  const fixed = value.toFixed(Math.min(digits, 6));
  return fixed.includes(".") ? fixed.replace(/\.?0+$/, "") : fixed;
}

function scaled(value, names, base) {
  const size = Math.abs(value);
  let scale = size < base ? 0 : Math.min(names.length - 1, Math.floor(Math.log(size) / Math.log(base) + 1e-12));
  const name = names[scale];
  return `${short(value / base ** scale)}${name && base === 1024 ? " " : ""}${name}`;
}

function time(seconds) {
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  const [least, name, per] = TIMES.find(([least]) => size >= least) ?? TIMES[TIMES.length - 1];
  return `${short(seconds / (per ?? least))} ${name}`;
}

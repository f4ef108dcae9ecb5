// Numbers for people.

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = count;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

export function count(value) {
  return value.toLocaleString("en-GB");
}

export function perSecond(tokens, milliseconds) {
  return milliseconds > 0 ? `${((tokens * 1000) / milliseconds).toFixed(1)} tok/s` : "";
}

// Selection that all figures share, and functions for searching, formatting and escaping.

// Step of the slider; layer and head from 0, or null for all; indices of row groups that are not shown.
const state = { step: 0, layer: null, head: null, hiddenGroups: new Set() };

const getElement = id => document.getElementById(id);

const escapeHtml = text => String(text).replace(/[&<>"']/g, character => `&#${character.charCodeAt(0)};`);

// Format a number with a number of digits after the point; very large and very small ones in exponential notation.
function formatNumber(value, digits) {
  const size = Math.abs(value);
  if (size >= 1e7 || (size && size < 1e-4)) return value.toExponential(1);
  return size && size < 10 ** -digits ? String(+value.toPrecision(2)) : value.toFixed(digits);
}

// Return the index of the last of the ascending `steps` that is at most `step`, or 0 if there is none.
function findLastIndexUpTo(steps, step) {
  let index = 0;
  while (index + 1 < steps.length && steps[index + 1] <= step) index++;
  return index;
}

// Return the index of the value that is nearest to `target`.
function findNearestIndex(values, target) {
  let best = 0;
  for (let index = 1; index < values.length; index++)
    if (Math.abs(values[index] - target) < Math.abs(values[best] - target)) best = index;
  return best;
}

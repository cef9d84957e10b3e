// What sinklab/report/figure_data.py has packed: the JSON, and `array`, which finds an array that the JSON points to.
const KINDS = { f4: Float32Array, i4: Int32Array, u1: Uint8Array, u2: Uint16Array };

async function unpacked(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at++) bytes[at] = letters.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  const whole = await new Response(stream).arrayBuffer();
  const length = new DataView(whole).getUint32(0, true);
  const content = JSON.parse(new TextDecoder().decode(new Uint8Array(whole, 4, length)));
  content.array = ([kind, at, size]) => new KINDS[kind](whole, 4 + length + at, size);
  return content;
}

// What is shown: `step` of the slider, `layer` and `head` from 1 (0: all), the places of the rows that are not.
let shown; // what was unpacked
const state = { step: 0, layer: 0, head: 0, hidden: new Set() };

const escaped = text => String(text).replace(/[&<>"']/g, letter => `&#${letter.charCodeAt(0)};`);
const said = (value, digits) => {
  const size = Math.abs(value);
  if (size >= 1e5 || (size && size < 1e-4)) return value.toExponential(1);
  return size && size < 10 ** -digits ? String(+value.toPrecision(2)) : value.toFixed(digits);
};

// The newest of `steps` at or before one; the first where there is none.
function newest(steps, step) {
  let at = 0;
  while (at + 1 < steps.length && steps[at + 1] <= step) at++;
  return at;
}

function nearest(values, value) {
  let best = 0;
  for (let at = 1; at < values.length; at++)
    if (Math.abs(values[at] - value) < Math.abs(values[best] - value)) best = at;
  return best;
}

// A table of values, for who reads instead of looking.
function tabled(headings, rows) {
  const head = headings.map(one => `<th scope="col">${escaped(one)}</th>`).join('');
  const body = rows
    .map(
      cells =>
        `<tr><th scope="row">${escaped(cells[0])}</th>${cells
          .slice(1)
          .map(one => `<td>${escaped(one)}</td>`)
          .join('')}</tr>`,
    )
    .join('');
  return `<table><thead><tr>${head}</tr></thead><tbody>${body}</tbody></table>`;
}

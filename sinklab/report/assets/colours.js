// Of rows (in page.css: Okabe and Ito, lighter at night, grey for black) and of maps (viridis; from blue to red where
// some values are negative).
const COLOURS = Array.from({ length: 7 }, (_, at) => `var(--row-${at})`);
const DASHES = ['', '7 3', '2 3', '9 3 2 3'];
const colour = arm => COLOURS[arm % COLOURS.length];
const dash = arm => DASHES[Math.floor(arm / COLOURS.length) % DASHES.length];

const swatch = arm =>
  `<svg class="swatch" viewBox="0 0 22 10" aria-hidden="true"><path d="M1 5H21" fill="none" stroke="${colour(
    arm,
  )}" stroke-width="3" stroke-dasharray="${dash(arm)}"/></svg>`;

const VIRIDIS = ['440154', '482878', '3e4989', '31688e', '26828e', '1f9e89', '35b779', '6ece58', 'b5de2b', 'fde725'];
const DIVERGING = ['2166ac', '67a9cf', 'd1e5f0', 'f7f7f7', 'fddbc7', 'ef8a62', 'b2182b'];
const LEVELS = 256;

// RGB of 256 levels between some colours.
function ramp(anchors) {
  const found = new Uint8Array(3 * LEVELS);
  const part = (anchor, place) => parseInt(anchors[anchor].slice(2 * place, 2 * place + 2), 16);
  for (let level = 0; level < LEVELS; level++) {
    const at = (level / (LEVELS - 1)) * (anchors.length - 1),
      left = Math.min(Math.floor(at), anchors.length - 2);
    for (let place = 0; place < 3; place++) {
      found[3 * level + place] = Math.round(
        part(left, place) * (left + 1 - at) + part(left + 1, place) * (at - left),
      );
    }
  }
  return found;
}

const RAMPS = { sequential: ramp(VIRIDIS), diverging: ramp(DIVERGING) };
const gradient = figure =>
  `linear-gradient(90deg, ${(figure.low < 0 ? DIVERGING : VIRIDIS).map(one => `#${one}`).join(', ')})`;

// Colours of row groups (defined in page.css: Okabe and Ito, lighter on dark pages, grey for black), and colour scales
// of maps (viridis; blue to red if some values are negative).
const NUM_COLOURS = 7;
const DASHES = ['', '7 3', '2 3', '9 3 2 3'];
const getColour = group => `var(--group-${group % NUM_COLOURS})`;
const getDash = group => DASHES[Math.floor(group / NUM_COLOURS) % DASHES.length];

const renderSwatch = group =>
  '<svg class="swatch" viewBox="0 0 22 10" aria-hidden="true"><path d="M1 5H21" fill="none" ' +
  `stroke="${getColour(group)}" stroke-width="3" stroke-dasharray="${getDash(group)}"/></svg>`;

const VIRIDIS = ['440154', '482878', '3e4989', '31688e', '26828e', '1f9e89', '35b779', '6ece58', 'b5de2b', 'fde725'];
const DIVERGING = ['2166ac', '67a9cf', 'd1e5f0', 'f7f7f7', 'fddbc7', 'ef8a62', 'b2182b'];
const NUM_LEVELS = 256;

// Return the red, green, blue and alpha of NUM_LEVELS colours, interpolated linearly between hexadecimal colours.
function interpolateColours(anchors) {
  const canvas = Object.assign(document.createElement('canvas'), { width: NUM_LEVELS, height: 1 });
  const context = canvas.getContext('2d');
  const gradient = context.createLinearGradient(0.5, 0, NUM_LEVELS - 0.5, 0);
  anchors.forEach((anchor, index) => gradient.addColorStop(index / (anchors.length - 1), `#${anchor}`));
  context.fillStyle = gradient;
  context.fillRect(0, 0, NUM_LEVELS, 1);
  return context.getImageData(0, 0, NUM_LEVELS, 1).data;
}

const COLOUR_SCALES = { sequential: interpolateColours(VIRIDIS), diverging: interpolateColours(DIVERGING) };

const makeGradient = figure =>
  `linear-gradient(90deg, ${(figure.scale_min < 0 ? DIVERGING : VIRIDIS).map(anchor => `#${anchor}`).join(', ')})`;

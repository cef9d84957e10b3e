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

// Return the red, green and blue of NUM_LEVELS colours, interpolated linearly between hexadecimal colours.
function interpolateColours(anchors) {
  const rgb = new Uint8Array(3 * NUM_LEVELS);
  const getChannel = (anchor, channel) => parseInt(anchors[anchor].slice(2 * channel, 2 * channel + 2), 16);
  for (let level = 0; level < NUM_LEVELS; level++) {
    const position = (level / (NUM_LEVELS - 1)) * (anchors.length - 1);
    const left = Math.min(Math.floor(position), anchors.length - 2);
    for (let channel = 0; channel < 3; channel++) {
      rgb[3 * level + channel] = Math.round(
        getChannel(left, channel) * (left + 1 - position) + getChannel(left + 1, channel) * (position - left),
      );
    }
  }
  return rgb;
}

const COLOUR_SCALES = { sequential: interpolateColours(VIRIDIS), diverging: interpolateColours(DIVERGING) };

const makeGradient = figure =>
  `linear-gradient(90deg, ${(figure.scale_min < 0 ? DIVERGING : VIRIDIS).map(anchor => `#${anchor}`).join(', ')})`;

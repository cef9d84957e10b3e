// Unpack the payload of sinklab/report/page.py, draw all figures, and update them when the selection changes.
const ARRAY_TYPES = { f4: Float32Array, i4: Int32Array, u1: Uint8Array, u2: Uint16Array };
let controls;
let figures = [];
let pendingUpdate = '';

const decodeBase64 = text => Uint8Array.from(atob(text), character => character.charCodeAt(0));
const decodeArray = ([dtype, text]) => new ARRAY_TYPES[dtype](decodeBase64(text).buffer);

function unpackPayload(text) {
  const stream = new Blob([decodeBase64(text)]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).json();
}

// Call a method of all figures before the next frame: 'updateStep' if only the step changed, otherwise 'draw'.
function requestUpdate(method) {
  if (!pendingUpdate)
    requestAnimationFrame(() => {
      const requested = pendingUpdate;
      pendingUpdate = '';
      figures.forEach(figure => figure[requested]());
    });
  if (pendingUpdate !== 'draw') pendingUpdate = method;
}

function createFigure(data, spec) {
  const container = getElement(`figure-${spec.name}`).querySelector('.plot');
  const figure = new (spec.maps ? MapFigure : LineFigure)(data, spec, container);
  figure.draw();
  return figure;
}

async function drawPage() {
  if (typeof DecompressionStream === 'undefined') throw new Error('a browser of 2023 or later is needed');
  const data = await unpackPayload(getElement('payload').textContent);
  controls = new Controls(data);
  figures = data.figures.map(spec => createFigure(data, spec));
  addEventListener('resize', () => requestUpdate('draw'));
  document.documentElement.dataset.drawMilliseconds = Math.round(performance.now()); // tests wait for it
}

drawPage().catch(error => {
  console.error(error);
  const text = `<p>The figures cannot be drawn: ${escapeHtml(error.message)}</p>`;
  document.querySelector('main').insertAdjacentHTML('afterbegin', text);
});

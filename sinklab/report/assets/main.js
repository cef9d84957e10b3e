// Draw all figures when the payload is unpacked, and update them when the selection changes.
let controls;
let figures = [];
let pendingUpdate = '';

// Call a method of all figures before the next frame: 'updateStep' if only the step changed, otherwise 'draw'.
function requestUpdate(method) {
  if (!pendingUpdate)
    requestAnimationFrame(() => {
      const requested = pendingUpdate;
      pendingUpdate = '';
      figures.forEach(figure => figure[requested]());
      figures.forEach(updateValues);
    });
  if (pendingUpdate !== 'draw') pendingUpdate = method;
}

function updateValues(figure) {
  const details = figure.section.querySelector('.values');
  const frame = details.querySelector('.scroll');
  if (details.open) frame.innerHTML = figure.renderValues();
  updateScrollHint(frame);
}

// Show a hint below a table that is wider than its frame, and fade the right edge unless it is scrolled to the end.
function updateScrollHint(frame) {
  const hiddenPixels = frame.scrollWidth - frame.clientWidth;
  frame.classList.toggle('clipped', hiddenPixels - frame.scrollLeft > 2);
  frame.nextElementSibling.hidden = hiddenPixels <= 2;
}

function updateScrollHints() {
  document.querySelectorAll('.scroll').forEach(updateScrollHint);
}

// Create and draw a figure; if that fails, show the error in its place and return null.
function createFigure(data, spec) {
  const section = getElement(`figure-${spec.name}`);
  const container = section.querySelector('.plot');
  try {
    const figure = new (spec.maps ? MapFigure : LineFigure)(data, spec, container);
    figure.section = section;
    figure.draw();
    section.querySelector('.values').addEventListener('toggle', () => updateValues(figure));
    return figure;
  } catch (error) {
    console.error(error);
    container.innerHTML = `<p>This figure cannot be drawn: ${escapeHtml(error.message)}</p>`;
    return null;
  }
}

function redrawOnResize() {
  let width = document.body.clientWidth;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    updateScrollHints();
    requestUpdate('draw');
  }).observe(document.body);
}

async function drawPage() {
  if (typeof DecompressionStream === 'undefined') throw new Error('a browser of 2023 or later is needed');
  const data = await unpackPayload(getElement('payload').textContent);
  controls = new Controls(data);
  figures = data.figures.map(spec => createFigure(data, spec)).filter(Boolean);
  document
    .querySelectorAll('.scroll')
    .forEach(frame => frame.addEventListener('scroll', () => updateScrollHint(frame)));
  document.querySelectorAll('details').forEach(details => details.addEventListener('toggle', updateScrollHints));
  updateScrollHints();
  redrawOnResize();
  document.documentElement.dataset.drawMilliseconds = Math.round(performance.now()); // tests wait for it
}

drawPage().catch(error => {
  console.error(error);
  const text = `<p>The figures cannot be drawn: ${escapeHtml(error.message)}</p>`;
  document.querySelector('main').insertAdjacentHTML('afterbegin', text);
});

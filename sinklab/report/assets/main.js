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

function createFigure(data, description) {
  const section = document.getElementById(`figure-${description.name}`);
  const FigureClass = description.maps ? MapFigure : LineFigure;
  const figure = new FigureClass(data, description, section.querySelector('.drawn'));
  figure.section = section;
  section.querySelector('.values').addEventListener('toggle', () => updateValues(figure));
  figure.draw();
  return figure;
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

async function start() {
  const data = await unpackPayload(getElement('packed').textContent);
  controls = new Controls(data);
  figures = data.figures.map(description => createFigure(data, description));
  document
    .querySelectorAll('.scroll')
    .forEach(frame => frame.addEventListener('scroll', () => updateScrollHint(frame)));
  document.querySelectorAll('details').forEach(details => details.addEventListener('toggle', updateScrollHints));
  updateScrollHints();
  redrawOnResize();
  document.documentElement.dataset.drawn = Math.round(performance.now()); // milliseconds; tests wait for it
}

start().catch(error => {
  console.error(error);
  const text = `The figures cannot be drawn here (${escapeHtml(error.message)}); a browser of 2023 or later can.`;
  document.querySelector('main').insertAdjacentHTML('afterbegin', `<p>${text}</p>`);
});

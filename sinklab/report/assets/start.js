// Draws every figure, once what they draw is unpacked, and again when something is chosen.
let controls,
  figures = [],
  waiting = '';

// 'move' where the step alone has changed, 'draw' where more has; once a frame, however often it is asked for.
function redraw(how) {
  if (!waiting)
    requestAnimationFrame(() => {
      const asked = waiting;
      waiting = '';
      figures.forEach(one => one[asked]());
      figures.forEach(values);
    });
  waiting = waiting === 'draw' ? waiting : how;
}

function values(one) {
  const details = one.section.querySelector('.values');
  if (details.open) details.querySelector('.scroll').innerHTML = one.values();
  hint(details.querySelector('.scroll'));
}

// Says below a table that it is wider than its frame, and fades its right edge until it is scrolled to its end.
function hint(frame) {
  const hidden = frame.scrollWidth - frame.clientWidth; // pixels
  frame.classList.toggle('clipped', hidden - frame.scrollLeft > 2);
  frame.nextElementSibling.hidden = hidden <= 2;
}

function hints() {
  document.querySelectorAll('.scroll').forEach(hint);
}

function drawn(data, figure) {
  const section = document.getElementById(`figure-${figure.name}`),
    box = section.querySelector('.drawn');
  const one = new (figure.maps ? Maps : Lines)(data, figure, box);
  one.section = section;
  section.querySelector('.values').addEventListener('toggle', () => values(one));
  one.draw();
  return one;
}

async function start() {
  shown = await unpacked(part('packed').textContent);
  controls = new Controls(shown);
  figures = shown.figures.map(figure => drawn(shown, figure));
  document.querySelectorAll('.scroll').forEach(frame => frame.addEventListener('scroll', () => hint(frame)));
  document.querySelectorAll('details').forEach(one => one.addEventListener('toggle', hints));
  hints();
  let width = document.body.clientWidth;
  new ResizeObserver(() => {
    if (document.body.clientWidth !== width) {
      width = document.body.clientWidth;
      hints();
      redraw('draw');
    }
  }).observe(document.body);
  document.documentElement.dataset.drawn = Math.round(performance.now());
}

start().catch(error => {
  console.error(error);
  document
    .querySelector('main')
    .insertAdjacentHTML(
      'afterbegin',
      `<p>The figures cannot be drawn here (${escaped(error.message)}); a browser of 2023 or later can.</p>`,
    );
});

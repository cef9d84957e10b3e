// The slider of steps, the filters by row, layer and head, light and dark: one of each for the whole page.
const part = id => document.getElementById(id);

class Controls {
  constructor(data) {
    this.data = data;
    this.steps();
    this.rows();
    for (const name of ['layer', 'head']) this.filter(name);
    part('theme').addEventListener('click', theme);
    document.addEventListener('keydown', event => this.key(event));
  }

  steps() {
    const { steps } = this.data,
      slider = part('step');
    state.step = steps[steps.length - 1] ?? Infinity;
    slider.closest('label').hidden = steps.length < 2;
    slider.max = Math.max(0, steps.length - 1);
    slider.value = slider.max;
    slider.setAttribute('aria-keyshortcuts', '[ ]');
    slider.addEventListener('input', () => this.stepBy(0));
    this.tell();
  }

  tell() {
    const step = this.data.steps[+part('step').value];
    part('step-said').textContent = step ?? '';
    part('step').setAttribute('aria-valuetext', `step ${step}`);
  }

  stepBy(by) {
    const slider = part('step');
    slider.value = +slider.value + by;
    state.step = this.data.steps[+slider.value] ?? Infinity;
    this.tell();
    redraw('move');
  }

  stepTo(step) {
    part('step').value = nearest(this.data.steps, step);
    this.stepBy(0);
  }

  key(event) {
    const by = { '[': -1, ']': 1 }[event.key];
    if (by && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) this.stepBy(by);
  }

  filter(name) {
    const menu = part(name),
      across = name === 'layer' ? 'rows' : 'columns';
    const maps = this.data.figures.filter(figure => figure.kind === 'heads').flatMap(figure => figure.maps);
    const count = Math.max(0, ...maps.map(map => map[across]));
    menu.closest('label').hidden = !count;
    menu.insertAdjacentHTML(
      'beforeend',
      Array.from({ length: count }, (_, at) => `<option>${at + 1}</option>`).join(''),
    );
    menu.addEventListener('change', () => {
      state[name] = +menu.value;
      redraw('draw');
    });
  }

  choose(layer, head) {
    part('layer').value = state.layer = layer;
    part('head').value = state.head = head;
    redraw('draw');
  }

  rows() {
    const { arms } = this.data;
    part('arms').innerHTML = arms
      .map(
        (arm, at) => `<label><input type="checkbox" checked value="${at}">${swatch(at)}${escaped(arm.name)}</label>`,
      )
      .join('');
    part('arms').addEventListener('change', () => this.hide());
    part('every').addEventListener('click', () => this.check(() => true));
    part('none').addEventListener('click', () => this.check(() => false));
    part('words').addEventListener('input', () => {
      const words = part('words').value.toLowerCase().split(' ').filter(Boolean);
      this.check(at => words.every(word => arms[at].name.toLowerCase().includes(word)));
    });
    part('which').hidden = arms.length < 2;
    part('which').open = arms.length > 1 && arms.length <= 6 && innerWidth > 700;
    this.hide(false);
  }

  boxes() {
    return [...part('arms').querySelectorAll('input')];
  }

  check(wanted) {
    this.boxes().forEach((box, at) => {
      box.checked = wanted(at);
    });
    this.hide();
  }

  hide(again = true) {
    state.hidden = new Set(
      this.boxes()
        .filter(box => !box.checked)
        .map(box => +box.value),
    );
    part('which-said').textContent = `(${this.data.arms.length - state.hidden.size} of ${this.data.arms.length})`;
    document.querySelectorAll('tr[data-arm]').forEach(row => {
      row.hidden = state.hidden.has(+row.dataset.arm);
    });
    if (again) redraw('draw');
  }

  say(text) {
    part('said').textContent = text;
  }
}

function theme() {
  const root = document.documentElement,
    dark = matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme = (root.dataset.theme ?? (dark ? 'dark' : 'light')) === 'dark' ? 'light' : 'dark';
}

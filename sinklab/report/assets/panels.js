// A panel of lines that is read by pointer, slider and keys, and the figures that are made of panels.
const whose = line => (MAIN.has(line.kind) ? '' : ', published');

class Panel {
  constructor(data, panel, box) {
    Object.assign(this, { data, panel, box });
    box.className = 'panel';
    box.innerHTML = `<h3 title="${escaped(panel.sentence)}">${escaped(panel.label)}</h3>
      <svg role="img" tabindex="0"></svg><ul class="legend"></ul>`;
    [this.svg, this.legend] = [box.querySelector('svg'), box.querySelector('ul')];
    this.svg.addEventListener('pointermove', event => this.point(event));
    this.svg.addEventListener('pointerleave', () => this.move());
    this.svg.addEventListener('click', event => panel.x === 'step' && controls.stepTo(this.under(event)));
    this.svg.addEventListener('keydown', event => this.key(event));
  }

  draw() {
    this.lines = series(this.data, this.panel);
    const width = Math.max(220, this.box.clientWidth);
    if (!this.lines.length) {
      this.at = null;
      this.svg.style.height = '2rem';
      this.svg.innerHTML = '<text x="8" y="20">no row is shown</text>';
      this.legend.innerHTML = '';
      return;
    }
    const at = (this.at = frame(this.panel, this.lines, width));
    this.svg.setAttribute('viewBox', `0 0 ${at.width} ${at.height}`);
    this.svg.style.height = `${at.height}px`;
    const above = line => MAIN.has(line.kind) + 2 * Boolean(line.dots);
    const order = [...this.lines].sort((a, b) => above(a) - above(b));
    const drawn = order.map(line => drawnLine(line, at));
    const cursor = tag('path', { class: 'cursor now' });
    this.svg.innerHTML = [axes(this.panel, at), ...drawn, marks(this.panel, this.lines, at), cursor].join('');
    this.move();
  }

  // The cursor stands at the step of the slider, the layer that is chosen, or the last value.
  move() {
    if (!this.at) return;
    this.read(
      this.panel.x === 'step' ? state.step : this.panel.x === 'block' && state.layer ? state.layer : this.at.last,
    );
  }

  // What is read out at a place: [row, words, value].
  found(place) {
    if (!this.panel.ticks) {
      const main = this.lines.filter(line => MAIN.has(line.kind));
      return main.map(line => [line.arm, named(this.data, line), this.told(line, nearest(line.xs, place))]);
    }
    return this.lines.flatMap(line =>
      [...line.xs.keys()]
        .filter(i => line.xs[i] === Math.round(place))
        .map(i => [line.arms[i], this.data.arms[line.arms[i]].name + whose(line), this.told(line, i)]),
    );
  }

  // A value of a line as it is read out: some are an interval, of which the middle is drawn.
  told(line, i) {
    return line.words?.[i] ?? said(line.ys[i], this.panel.digits);
  }

  read(x) {
    const at = this.at;
    this.x = Math.min(Math.max(x, at.first), at.last);
    const place = this.panel.ticks ? Math.round(this.x) : this.x;
    this.svg.querySelector('.now').setAttribute('d', `M${at.x(place)} 4V${at.bottom}`);
    const found = this.found(place);
    const items = found
      .slice(0, LEGEND)
      .map(([arm, name, value]) => `<li>${swatch(arm)}<span>${escaped(name)}</span> <b>${value}</b></li>`);
    if (found.length > LEGEND) items.push(`<li>and ${found.length - LEGEND} more</li>`);
    this.legend.innerHTML = items.join('');
    const told = found.slice(0, LEGEND).map(([, name, value]) => `${name} ${value}`);
    const where = this.panel.ticks ? this.panel.ticks[place] : tick(place);
    const words = `${this.panel.label} by ${this.panel.x}; at ${this.panel.x} ${where}: ${told.join(', ')}`;
    this.svg.setAttribute('aria-label', words);
  }

  under(event) {
    return this.at ? this.at.back(event.clientX - this.svg.getBoundingClientRect().left) : 0;
  }

  point(event) {
    if (this.at) this.read(this.panel.x === 'step' ? this.under(event) : Math.round(this.under(event)));
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.at) return;
    event.preventDefault();
    if (this.panel.x === 'step') controls.stepBy(by);
    else this.read(Math.round(this.x) + by);
    controls.say(this.svg.getAttribute('aria-label'));
  }

  values() {
    const main = this.lines.filter(line => MAIN.has(line.kind)),
      xs = [...new Set(main.flatMap(line => [...line.xs]))].sort((a, b) => a - b);
    const kept = main.map(line => new Map(Array.from(line.xs, (x, at) => [x, this.told(line, at)])));
    return tabled(
      [this.panel.x, ...main.map(line => `${this.panel.label}: ${named(this.data, line)}`)],
      xs.map(x => [
        this.panel.ticks ? this.panel.ticks[x] : x,
        ...kept.map(values => values.get(x) ?? ''),
      ]),
    );
  }
}

// All panels of a figure side by side; of a choice, the one that is chosen.
class Lines {
  constructor(data, figure, box) {
    Object.assign(this, { data, figure, box });
    this.choice = figure.kind === 'choice' ? document.createElement('select') : null;
    this.area = document.createElement('div');
    this.area.className = 'panels';
    box.append(...(this.choice ? [this.choice] : []), this.area);
    if (this.choice) this.offer();
    this.panels = (this.choice ? figure.panels.slice(0, 1) : figure.panels).map(panel => this.add(panel));
  }

  add(panel) {
    return new Panel(this.data, panel, this.area.appendChild(document.createElement('div')));
  }

  offer() {
    this.choice.setAttribute('aria-label', 'number');
    this.choice.innerHTML = this.figure.panels
      .map((panel, at) => `<option value="${at}">${escaped(panel.label)}</option>`)
      .join('');
    this.choice.addEventListener('change', () => {
      this.area.replaceChildren();
      this.panels = [this.add(this.figure.panels[+this.choice.value])];
      this.draw();
    });
  }

  draw() {
    this.panels.forEach(panel => panel.draw());
  }
  move() {
    this.panels.forEach(one => (one.panel.x === 'block' ? one.draw() : one.move()));
  }
  values() {
    return this.panels.map(panel => panel.values()).join('<br>');
  }
}

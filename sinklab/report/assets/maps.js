// Figures of maps: values of layers and heads, or a matrix of one head, each as small pixels made large.
const FEW = 12; // maps that are drawn before they are asked for
const USUAL = 4; // heads of each run, where none is chosen

class MapOf {
  constructor(data, figure, map, box) {
    Object.assign(this, { data, figure, map, box, cell: [map.rows - 1, 0], values: data.array(map.values) });
    const { rows, columns, first } = map,
      upward = figure.kind === 'heads';
    box.className = 'map';
    const [low, high] = upward ? [1, rows] : [rows, 1];
    const spans = (...words) => words.map(one => `<span>${one}</span>`).join('');
    box.innerHTML = `<figcaption></figcaption><div class="frame">
      <div class="up" aria-hidden="true">${spans(low, figure.up, high)}</div>
      <canvas role="img" tabindex="0" width="${columns}" height="${rows}"></canvas>
      <div class="across" aria-hidden="true">${spans(first, figure.across, first + columns - 1)}</div>
      </div><div class="read"></div>`;
    [this.canvas, this.caption, this.told] = ['canvas', 'figcaption', '.read'].map(one => box.querySelector(one));
    this.canvas.style.setProperty('--aspect', Math.min(1.8, Math.max(0.6, columns / rows)));
    this.canvas.addEventListener('pointermove', event => this.point(event));
    this.canvas.addEventListener('pointerleave', () => {
      this.told.textContent = '';
    });
    this.canvas.addEventListener('click', () => this.choose());
    this.canvas.addEventListener('keydown', event => this.key(event));
  }

  value(row, column) {
    const { rows, columns, depth } = this.map,
      at = (this.at * rows + row) * columns + column;
    return this.figure.low + (this.values[at] / depth) * (this.figure.top - this.figure.low);
  }

  draw() {
    const { map, figure } = this,
      { rows, columns } = map,
      upward = figure.kind === 'heads';
    this.at = newest(map.steps, state.step);
    const context = this.canvas.getContext('2d'),
      image = context.createImageData(columns, rows);
    const colours = figure.low < 0 ? RAMPS.diverging : RAMPS.sequential,
      start = this.at * rows * columns;
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        const level = Math.round((this.values[start + row * columns + column] / map.depth) * (LEVELS - 1));
        const at = 4 * ((upward ? rows - 1 - row : row) * columns + column);
        for (let part = 0; part < 3; part++) image.data[at + part] = colours[3 * level + part];
        image.data[at + 3] = upward && this.isDim(row, column) ? 70 : 255;
      }
    }
    context.putImageData(image, 0, 0);
    this.name();
  }

  isDim(row, column) {
    return (state.layer && row + 1 !== state.layer) || (state.head && column + 1 !== state.head);
  }

  name() {
    const { map } = this,
      which = map.head ? `, layer ${map.layer} head ${map.head}` : '';
    const before = map.steps[this.at] === state.step ? '' : ` (step ${map.steps[this.at]})`;
    const run = this.data.runs[map.run];
    this.caption.innerHTML = `${swatch(run.arm)} ${escaped(run.name + which + before)}`;
    this.canvas.setAttribute(
      'aria-label',
      `${this.caption.textContent.trim()}, step ${map.steps[this.at]}: ${this.figure.label} ${this.summary()}`,
    );
  }

  // Of a map the largest value, of a matrix what its first key gets.
  summary() {
    const { rows, columns, first } = this.map;
    if (this.map.head) {
      let sum = 0;
      for (let row = 0; row < rows; row++) sum += this.value(row, 1 - first);
      return `to key 1 ${said(sum / rows, 3)} on average`;
    }
    let best = [0, 0];
    for (let row = 0; row < rows; row++)
      for (let column = 0; column < columns; column++) {
        if (this.value(row, column) > this.value(...best)) best = [row, column];
      }
    return `largest ${said(this.value(...best), 3)} in layer ${best[0] + 1} head ${best[1] + 1}`;
  }

  words([row, column]) {
    const { up, across } = this.figure,
      value = said(this.value(row, column), 3);
    return `${up} ${row + 1}, ${across} ${column + this.map.first}: ${value}`;
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect(),
      { rows, columns } = this.map;
    const row = Math.min(rows - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * rows)));
    const column = Math.min(columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * columns)));
    this.cell = [this.figure.kind === 'heads' ? rows - 1 - row : row, column];
    this.told.textContent = this.words(this.cell);
  }

  key(event) {
    const up = this.figure.kind === 'heads' ? 1 : -1,
      { rows, columns } = this.map;
    const by = { ArrowUp: [up, 0], ArrowDown: [-up, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
    if (event.key === 'Enter') this.choose();
    if (!by) return;
    event.preventDefault();
    this.cell = [
      Math.min(rows - 1, Math.max(0, this.cell[0] + by[0])),
      Math.min(columns - 1, Math.max(0, this.cell[1] + by[1])),
    ];
    this.told.textContent = this.words(this.cell);
    controls.say(this.told.textContent);
  }

  // A click on a head shows it alone, and one more all again.
  choose() {
    if (this.figure.kind !== 'heads') return;
    const [layer, head] = [this.cell[0] + 1, this.cell[1] + 1],
      same = state.layer === layer && state.head === head;
    controls.choose(same ? 0 : layer, same ? 0 : head);
  }
}

class Maps {
  constructor(data, figure, box) {
    Object.assign(this, { data, figure, box, all: false, drawn: [], made: new Map() });
    const top = `${said(figure.top, figure.top < 10 ? 2 : 0)} ${escaped(figure.label)}`;
    box.innerHTML = `<div class="scale"><span>${said(figure.low, 1)}</span>
      <i style="background:${gradient(figure)}"></i><span>${top}</span></div>
      <div class="maps"></div><p class="none"></p>`;
    [this.area, this.none] = [box.querySelector('.maps'), box.querySelector('.none')];
    this.more = document.createElement('button');
    this.more.type = 'button';
    this.more.addEventListener('click', () => {
      this.all = true;
      this.draw();
    });
    box.append(this.more);
  }

  wanted() {
    const rows = this.figure.maps.filter(map => !state.hidden.has(this.data.runs[map.run].arm));
    if (this.figure.kind === 'heads') return rows;
    if (state.layer || state.head) {
      return rows.filter(
        map => (!state.layer || map.layer === state.layer) && (!state.head || map.head === state.head),
      );
    }
    const counts = new Map();
    return rows.filter(map => counts.set(map.run, (counts.get(map.run) ?? 0) + 1).get(map.run) <= USUAL);
  }

  draw() {
    const wanted = this.wanted(),
      kept = this.all ? wanted : wanted.slice(0, FEW);
    this.drawn = kept.map(map => this.made.get(map) ?? this.make(map));
    this.area.replaceChildren(...this.drawn.map(one => one.box));
    this.more.hidden = kept.length === wanted.length;
    this.more.textContent = `all ${wanted.length}`;
    const chosen = state.layer || state.head;
    this.none.textContent = wanted.length
      ? ''
      : chosen && this.figure.kind === 'matrices'
        ? 'This page contains no matrix of this head, only those of the strongest heads of each run.'
        : 'no row is shown';
    this.move();
  }

  make(map) {
    const one = new MapOf(this.data, this.figure, map, document.createElement('figure'));
    this.made.set(map, one);
    return one;
  }

  move() {
    this.drawn.forEach(one => one.draw());
  }

  values() {
    const of = one => one.box.querySelector('figcaption').textContent.trim();
    if (this.figure.kind === 'matrices')
      return tabled(
        ['head', this.figure.label],
        this.drawn.map(one => [of(one), one.summary()]),
      );
    return this.drawn
      .map(
        one =>
          `<p>${escaped(of(one))}, step ${one.map.steps[one.at]}</p>` +
          tabled(
            ['layer', ...Array.from({ length: one.map.columns }, (_, head) => `head ${head + 1}`)],
            Array.from({ length: one.map.rows }, (_, row) => [
              row + 1,
              ...Array.from({ length: one.map.columns }, (_, column) => said(one.value(row, column), 3)),
            ]),
          ),
      )
      .join('');
  }
}

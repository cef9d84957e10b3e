// Figures of lines: numbers over steps, along an axis of a sweep, and by block.
const MAIN = new Set(['only', 'mean', 'points']);  // are read out; the others are thin
const LOOK = {
  only: 'stroke-width="2"', mean: 'stroke-width="2.5"', points: 'stroke-width="2"', member: 'stroke-width="1" opacity=".45"',
  thin: 'stroke-width="1" opacity=".3"', dashed: 'stroke-width="1.5" stroke-dasharray="4 4" opacity=".7"',
  branch: 'stroke-width="1.5" stroke-dasharray="1 4" stroke-linecap="round"',
  published: 'stroke-width="1.5" stroke-dasharray="2 3" opacity=".8"',
};
const LEGEND = 12;

// The lines of a panel that are shown now, with their numbers.
function series(data, panel) {
  const all = panel.x === 'block' ? byBlock(data, panel) : panel.lines.map(line => ({ ...line, arm: line.arm ?? line.arms[0],
    xs: data.array(line.x), ys: data.array(line.y), sds: line.sd && data.array(line.sd) }));
  return all.filter(line => (line.arms ?? [line.arm]).some(arm => !state.hidden.has(arm)));
}

// Ratios at the step of the slider; where a row has several runs, their mean as well.
function byBlock(data, panel) {
  const lines = panel.lines.map(line => {
    const at = newest(line.steps, state.step) * line.blocks, ys = data.array(line.y).subarray(at, at + line.blocks);
    return { arm: line.arm, run: line.run, kind: 'only', xs: Array.from(ys, (_, block) => block + 1), ys };
  });
  for (const arm of new Set(lines.map(line => line.arm))) {
    const own = lines.filter(line => line.arm === arm && line.kind === 'only');
    if (own.length < 2) continue;
    own.forEach(line => { line.kind = 'member'; });
    const ys = own[0].xs.map((_, at) => own.reduce((sum, line) => sum + line.ys[at], 0) / own.length);
    lines.push({ arm, run: null, kind: 'mean', n: own.length, xs: own[0].xs, ys });
  }
  return lines;
}

function named(data, line) {
  if (line.kind === 'points') return line.arms.map(arm => data.arms[arm].name).join(', ');
  return line.run === null ? `${data.arms[line.arm].name}, mean of ${line.n}` : data.runs[line.run].name;
}

function nice(low, high, count) {
  const rough = (high - low || 1) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(one => one * power >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step);
  return found;
}

const tick = value => Math.abs(value) >= 1e4 ? `${+(value / 1000).toPrecision(4)}k` : String(+value.toPrecision(5));

// Where things stand in a panel: from numbers to pixels.
function frame(panel, lines, width) {
  const xs = lines.flatMap(line => [line.xs[0], line.xs[line.xs.length - 1]]), values = [];
  for (const line of lines) line.ys.forEach((y, at) => { const s = line.sds ? line.sds[at] : 0; values.push(y - s, y + s); });
  if (panel.rule !== undefined) values.push(panel.rule);
  let low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (panel.label.endsWith('(%)')) { low = Math.min(0, Math.max(low, 0)); high = Math.max(high, 1); }
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  low -= room; high += room;
  const height = Math.round(Math.min(300, Math.max(190, width * 0.6))), bottom = height - 36;
  const ticks = nice(low, high, height / 55), left = 14 + 7 * Math.max(...ticks.map(one => tick(one).length));
  const [first, last] = panel.ticks ? [-0.3, panel.ticks.length - 0.7] : [Math.min(...xs), Math.max(...xs)];
  const x = value => left + (value - first) / (last - first || 1) * (width - left - 18);
  return { width, height, bottom, left, ticks, first, last, x, y: value => 6 + (high - value) / (high - low) * (bottom - 6),
    back: pixel => first + (pixel - left) / (width - left - 18) * (last - first) };
}

function path(line, at) {
  let text = '';
  for (let i = 0; i < line.xs.length; i++) text += `${i ? 'L' : 'M'}${at.x(line.xs[i]).toFixed(1)} ${at.y(line.ys[i]).toFixed(1)}`;
  return text;
}

function band(line, at) {
  const over = sign => Array.from(line.xs, (x, i) => `${at.x(x).toFixed(1)} ${at.y(line.ys[i] + sign * line.sds[i]).toFixed(1)}`);
  return `<path d="M${over(1).join('L')}L${over(-1).reverse().join('L')}Z" fill="${colour(line.arm)}" opacity=".15"/>`;
}

function drawnLine(line, at) {
  const hue = line.kind === 'points' && line.arms.length > 1 ? 'currentColor' : colour(line.arm);
  const dashed = LOOK[line.kind].includes('dasharray') ? '' : `stroke-dasharray="${dash(line.arm)}"`;
  const under = line.kind === 'mean' && line.sds ? band(line, at) : '';
  return `${under}<path class="path" d="${path(line, at)}" stroke="${hue}" ${LOOK[line.kind]} ${dashed}/>${dots(line, at)}`;
}

// Points of a sweep with their spread, each in the colour of its row; those published, hollow.
function dots(line, at) {
  if (!line.arms) return line.xs.length === 1 ? `<circle cx="${at.x(line.xs[0])}" cy="${at.y(line.ys[0])}" r="3" fill="${colour(line.arm)}"/>` : '';
  return line.arms.map((arm, i) => {
    const x = at.x(line.xs[i]), y = at.y(line.ys[i]), hue = colour(arm), name = escaped(shown.arms[arm].name);
    const ours = line.kind === 'points', s = line.sds[i];
    const bar = ours && s ? `<path d="M${x} ${at.y(line.ys[i] - s)}V${at.y(line.ys[i] + s)}" stroke="${hue}"/>` : '';
    return `${bar}<circle cx="${x}" cy="${y}" r="4" fill="${ours ? hue : 'var(--back)'}" stroke="${hue}" stroke-width="1.5"><title>${
      name}: ${said(line.ys[i], 2)}${ours ? '' : ' (published)'}</title></circle>`;
  }).join('');
}

function marks(panel, lines, at) {
  const runs = new Set(lines.map(line => line.run));
  return (panel.marks ?? []).filter(mark => runs.has(mark.run)).map(mark => {
    const x = at.x(mark.x), y = at.y(mark.y), run = shown.runs[mark.run];
    return `<path class="mark" d="M${x} ${y - 6}l5 9h-10z" fill="${colour(run.arm)}" stroke="var(--back)"><title>${
      escaped(`${run.name}: ${mark.text}`)}</title></path>`;
  }).join('');
}

function axes(panel, at) {
  const right = at.width - 18, along = panel.ticks
    ? panel.ticks.map((label, place) => [place, label]).filter(([place]) => place % Math.ceil(panel.ticks.length * 46 / right) === 0)
    : nice(at.first, at.last, right / 75).filter(one => panel.x !== 'block' || one % 1 === 0).map(one => [one, tick(one)]);
  const across = at.ticks.map(value => `<path class="axis" d="M${at.left} ${at.y(value)}H${right}"/><text x="${
    at.left - 6}" y="${at.y(value) + 4}" text-anchor="end">${tick(value)}</text>`);
  const down = along.map(([value, label]) => `<text x="${at.x(value)}" y="${at.bottom + 16}" text-anchor="middle">${escaped(label)}</text>`);
  const rule = panel.rule === undefined ? '' : `<path class="cursor" d="M${at.left} ${at.y(panel.rule)}H${right}"/>`;
  return `${across.join('')}${down.join('')}${rule}<text x="${(at.left + right) / 2}" y="${at.height - 4}" text-anchor="middle">${escaped(panel.x)}</text>`;
}

class Panel {
  constructor(data, panel, box) {
    Object.assign(this, { data, panel, box });
    box.className = 'panel';
    box.innerHTML = `<h3 title="${escaped(panel.sentence)}">${escaped(panel.label)}</h3><svg role="img" tabindex="0"></svg><ul class="legend"></ul>`;
    [this.svg, this.legend] = [box.querySelector('svg'), box.querySelector('ul')];
    this.svg.addEventListener('pointermove', event => this.point(event));
    this.svg.addEventListener('pointerleave', () => this.move());
    this.svg.addEventListener('click', event => panel.x === 'step' && controls.stepTo(this.under(event)));
    this.svg.addEventListener('keydown', event => this.key(event));
  }

  draw() {
    this.lines = series(this.data, this.panel);
    const width = Math.max(220, this.box.clientWidth);
    if (!this.lines.length) { this.at = null; this.svg.innerHTML = '<text x="8" y="20">no row is shown</text>'; this.legend.innerHTML = ''; return; }
    const at = this.at = frame(this.panel, this.lines, width);
    this.svg.setAttribute('viewBox', `0 0 ${at.width} ${at.height}`);
    this.svg.style.height = `${at.height}px`;
    const order = [...this.lines].sort((a, b) => MAIN.has(a.kind) - MAIN.has(b.kind));
    this.svg.innerHTML = `${axes(this.panel, at)}${order.map(line => drawnLine(line, at)).join('')}${marks(this.panel, this.lines, at)}<path class="cursor now"/>`;
    this.move();
  }

  // The cursor stands at the step of the slider, the layer that is chosen, or the last value.
  move() {
    if (!this.at) return;
    this.read(this.panel.x === 'step' ? state.step : this.panel.x === 'block' && state.layer ? state.layer : this.at.last);
  }

  read(x) {
    const at = this.at, main = this.lines.filter(line => MAIN.has(line.kind));
    const place = Math.min(Math.max(x, at.first), at.last), cursor = this.svg.querySelector('.now');
    this.x = place;
    cursor.setAttribute('d', this.panel.ticks ? '' : `M${at.x(place)} 4V${at.bottom}`);
    const values = main.map(line => [named(this.data, line), line, line.ys[nearest(line.xs, place)]]);
    const items = values.slice(0, LEGEND).map(([name, line, value]) =>
      `<li>${this.panel.ticks ? '' : swatch(line.arm)}<span>${escaped(name)}</span> ${this.panel.ticks ? '' : `<b>${said(value, this.panel.digits)}</b>`}</li>`);
    if (values.length > LEGEND) items.push(`<li>and ${values.length - LEGEND} more</li>`);
    this.legend.innerHTML = items.join('');
    const told = values.slice(0, LEGEND).map(([name, , value]) => `${name} ${said(value, this.panel.digits)}`).join(', ');
    this.svg.setAttribute('aria-label', `${this.panel.label} by ${this.panel.x}; at ${this.panel.x} ${tick(place)}: ${told}`);
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
    const main = this.lines.filter(line => MAIN.has(line.kind)), xs = [...new Set(main.flatMap(line => [...line.xs]))].sort((a, b) => a - b);
    const kept = main.map(line => new Map(Array.from(line.xs, (x, at) => [x, line.ys[at]])));
    return tabled([this.panel.x, ...main.map(line => `${this.panel.label}: ${named(this.data, line)}`)], xs.map(x =>
      [this.panel.ticks ? this.panel.ticks[x] : x, ...kept.map(values => values.has(x) ? said(values.get(x), this.panel.digits) : '')]));
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
    this.choice.innerHTML = this.figure.panels.map((panel, at) => `<option value="${at}">${escaped(panel.label)}</option>`).join('');
    this.choice.addEventListener('change', () => {
      this.area.replaceChildren();
      this.panels = [this.add(this.figure.panels[+this.choice.value])];
      this.draw();
    });
  }

  draw() { this.panels.forEach(panel => panel.draw()); }
  move() { this.panels.forEach(one => one.panel.x === 'block' ? one.draw() : one.move()); }
  values() { return this.panels.map(panel => panel.values()).join('<br>'); }
}

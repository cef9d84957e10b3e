// Figures of lines: numbers over steps, along an axis of a sweep, and by block.
const MAIN = new Set(['only', 'mean', 'points']); // are read out; the others are thin
const LOOK = {
  only: { stroke_width: 2 },
  mean: { stroke_width: 2.5 },
  points: { stroke_width: 2 },
  member: { stroke_width: 1, opacity: 0.45 },
  dashed: { stroke_width: 1.5, stroke_dasharray: '4 4', opacity: 0.7 },
  branch: { stroke_width: 1.5, stroke_dasharray: '1 4', stroke_linecap: 'round' },
  published: { stroke_width: 1.5, stroke_dasharray: '2 3', opacity: 0.8 },
};
const LEGEND = 12;

// The lines of a panel that are shown now, with their numbers.
function series(data, panel) {
  const all =
    panel.x === 'block'
      ? byBlock(data, panel)
      : panel.lines.map(line => ({
          ...line,
          arm: line.arm ?? line.arms[0],
          xs: data.array(line.x),
          ys: data.array(line.y),
          sds: line.sd && data.array(line.sd),
        }));
  return all.filter(line => (line.arms ?? [line.arm]).some(arm => !state.hidden.has(arm)));
}

// Ratios at the step of the slider; where a row has several runs, their mean as well.
function byBlock(data, panel) {
  const lines = panel.lines.map(line => {
    const at = newest(line.steps, state.step) * line.blocks,
      ys = data.array(line.y).subarray(at, at + line.blocks);
    return { arm: line.arm, run: line.run, kind: 'only', xs: Array.from(ys, (_, block) => block + 1), ys };
  });
  for (const arm of new Set(lines.map(line => line.arm))) {
    const own = lines.filter(line => line.arm === arm && line.kind === 'only');
    if (own.length < 2) continue;
    own.forEach(line => {
      line.kind = 'member';
    });
    const ys = own[0].xs.map((_, at) => own.reduce((sum, line) => sum + line.ys[at], 0) / own.length);
    lines.push({ arm, run: null, kind: 'mean', n: own.length, xs: own[0].xs, ys });
  }
  return lines;
}

function named(data, line) {
  if (line.kind === 'points') return line.arms.map(arm => data.arms[arm].name).join(', ');
  const name = line.run === null ? `${data.arms[line.arm].name}, mean of ${line.n}` : data.runs[line.run].name;
  return line.what ? `${name}, ${line.what}` : name;
}

function nice(low, high, count) {
  const rough = (high - low || 1) / Math.max(1, count),
    power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(one => one * power >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step);
  return found;
}

const tick = value => (Math.abs(value) >= 1e4 ? `${+(value / 1000).toPrecision(4)}k` : String(+value.toPrecision(5)));

// Where things stand in a panel: from numbers to pixels.
function frame(panel, lines, width) {
  const xs = lines.flatMap(line => [line.xs[0], line.xs[line.xs.length - 1]]),
    values = [];
  for (const line of lines)
    line.ys.forEach((y, at) => {
      const s = line.sds ? line.sds[at] : 0;
      values.push(y - s, y + s);
    });
  if (panel.rule !== undefined) values.push(panel.rule);
  let low = values.reduce((a, b) => Math.min(a, b), Infinity),
    high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (panel.label.endsWith('(%)')) {
    low = Math.min(0, Math.max(low, 0));
    high = Math.max(high, 1);
  }
  if (low === 0 && high === 0) high = 1;
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  low = low >= 0 ? Math.max(0, low - room) : low - room; // what is never negative has no axis below 0
  high += room;
  const height = Math.round(Math.min(300, Math.max(190, width * 0.6))),
    bottom = height - 36;
  const ticks = nice(low, high, height / 55),
    left = 14 + 7 * Math.max(...ticks.map(one => tick(one).length));
  const [first, last] = panel.ticks ? [-0.3, panel.ticks.length - 0.7] : [Math.min(...xs), Math.max(...xs)];
  const x = value => left + ((value - first) / (last - first || 1)) * (width - left - 18);
  const faint = Math.min(0.15, 1 / lines.filter(line => line.kind === 'mean').length); // of bands over each other
  return {
    faint,
    width,
    height,
    bottom,
    left,
    ticks,
    first,
    last,
    x,
    y: value => 6 + ((high - value) / (high - low)) * (bottom - 6),
    back: pixel => first + ((pixel - left) / (width - left - 18)) * (last - first),
  };
}

function path(line, at) {
  let text = '';
  for (let i = 0; i < line.xs.length; i++)
    text += `${i ? 'L' : 'M'}${at.x(line.xs[i]).toFixed(1)} ${at.y(line.ys[i]).toFixed(1)}`;
  return text;
}

// An element of SVG as text; what is inside has been escaped.
function tag(name, given, inside = '') {
  const told = Object.entries(given).map(([key, value]) => ` ${key.replace('_', '-')}="${value}"`);
  return `<${name}${told.join('')}>${inside}</${name}>`;
}

const text = (x, y, words, anchor = 'middle') => tag('text', { x, y, text_anchor: anchor }, escaped(words));
const title = words => tag('title', {}, escaped(words));

function band(line, at) {
  const over = sign =>
    Array.from(line.xs, (x, i) => `${at.x(x).toFixed(1)} ${at.y(line.ys[i] + sign * line.sds[i]).toFixed(1)}`);
  const d = `M${over(1).join('L')}L${over(-1).reverse().join('L')}Z`;
  return tag('path', { d, fill: colour(line.arm), opacity: at.faint });
}

// A few values, such as those of validation, upon a curve of many.
function checked(line, at) {
  const look = { r: 3.5, fill: colour(line.arm), stroke: 'var(--back)', stroke_width: 1.5 };
  const spread = (x, y, sd) =>
    sd ? tag('path', { d: `M${x} ${at.y(y - sd)}V${at.y(y + sd)}`, stroke: colour(line.arm) }) : '';
  return Array.from(line.xs, (value, i) => {
    const x = at.x(value);
    return spread(x, line.ys[i], line.sds?.[i]) + tag('circle', { cx: x, cy: at.y(line.ys[i]), ...look });
  }).join('');
}

function drawnLine(line, at) {
  if (line.dots) return checked(line, at);
  const stroke = line.kind === 'points' && line.arms.length > 1 ? 'currentColor' : colour(line.arm);
  const under = line.kind === 'mean' && line.sds ? band(line, at) : '';
  const look = { stroke_dasharray: dash(line.arm), ...LOOK[line.kind] };
  return under + tag('path', { class: 'path', d: path(line, at), stroke, ...look }) + dots(line, at);
}

// Points of a sweep with their spread, each in the colour of its row; those published, hollow. A line of one value.
function dots(line, at) {
  const place = i => ({ cx: at.x(line.xs[i]), cy: at.y(line.ys[i]) });
  if (!line.arms) return line.xs.length === 1 ? tag('circle', { ...place(0), r: 3, fill: colour(line.arm) }) : '';
  const ours = line.kind === 'points';
  return line.arms
    .map((arm, i) => {
      const [hue, sd] = [colour(arm), line.sds[i]];
      const d = `M${at.x(line.xs[i])} ${at.y(line.ys[i] - sd)}V${at.y(line.ys[i] + sd)}`;
      const look = { r: 4, fill: ours ? hue : 'var(--back)', stroke: hue, stroke_width: 1.5 };
      const words = `${shown.arms[arm].name}: ${line.words?.[i] ?? said(line.ys[i], 2)}${ours ? '' : ' (published)'}`;
      const bar = ours && sd ? tag('path', { d, stroke: hue }) : '';
      return bar + tag('circle', { ...place(i), ...look }, title(words));
    })
    .join('');
}

function marks(panel, lines, at) {
  const runs = new Set(lines.map(line => line.run));
  const triangle = mark => {
    const run = shown.runs[mark.run];
    const look = { class: 'mark', fill: colour(run.arm), stroke: 'var(--back)' };
    const d = `M${at.x(mark.x)} ${at.y(mark.y) - 6}l5 9h-10z`;
    return tag('path', { d, ...look }, title(`${run.name}: ${mark.text}`));
  };
  return (panel.marks ?? []).filter(mark => runs.has(mark.run)).map(triangle).join('');
}

// [value, label] of the ticks below.
function ticksAlong(panel, at) {
  const width = at.width - at.left - 18;
  if (panel.ticks) {
    const longest = Math.max(...panel.ticks.map(label => label.length));
    const every = Math.ceil((panel.ticks.length * (14 + 7 * longest)) / width);
    return panel.ticks.map((label, place) => [place, label]).filter(([place]) => place % every === 0);
  }
  const found = nice(at.first, at.last, width / 75).filter(one => panel.x !== 'block' || one % 1 === 0);
  return found.map(one => [one, tick(one)]);
}

function axes(panel, at) {
  const right = at.width - 18;
  const rule = (y, look) => tag('path', { class: look, d: `M${at.left} ${at.y(y)}H${right}` });
  const across = at.ticks.map(value => rule(value, 'axis') + text(at.left - 6, at.y(value) + 4, tick(value), 'end'));
  const along = ticksAlong(panel, at).map(([value, label]) => text(at.x(value), at.bottom + 16, label));
  const one = panel.rule === undefined ? '' : rule(panel.rule, 'cursor');
  return [...across, ...along, one, text((at.left + right) / 2, at.height - 4, panel.x)].join('');
}

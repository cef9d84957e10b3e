// Lines of a panel as SVG: metrics over steps, along an axis of a sweep, or by block.

// Lines of these kinds are in the legend; others are thin.
const MAIN_KINDS = new Set(['only', 'mean', 'points']);
const LINE_ATTRIBUTES = {
  only: { stroke_width: 2 },
  mean: { stroke_width: 2.5 },
  points: { stroke_width: 2 },
  member: { stroke_width: 1, opacity: 0.45 },
  dashed: { stroke_width: 1.5, stroke_dasharray: '4 4', opacity: 0.7 },
  branch: { stroke_width: 1.5, stroke_dasharray: '1 4', stroke_linecap: 'round' },
  published: { stroke_width: 1.5, stroke_dasharray: '2 3', opacity: 0.8 },
};
const RIGHT_MARGIN = 18; // pixels
const BOTTOM_MARGIN = 36;
const TOP_MARGIN = 6;

// Return the lines of a panel that are not hidden, with their arrays.
function getVisibleLines(data, panel) {
  const lines =
    panel.x === 'block'
      ? makeBlockLines(data, panel)
      : panel.lines.map(line => ({
          ...line,
          group: line.group ?? line.groups[0],
          xs: data.getArray(line.x),
          ys: data.getArray(line.y),
          sds: line.sd && data.getArray(line.sd),
        }));
  return lines.filter(line => (line.groups ?? [line.group]).some(group => !state.hiddenGroups.has(group)));
}

// Make a line by block for each run, at the step of the slider, and the mean of each group that has several runs.
function makeBlockLines(data, panel) {
  const lines = panel.lines.map(line => {
    const start = findLastIndexUpTo(line.steps, state.step) * line.blocks;
    const ys = data.getArray(line.y).subarray(start, start + line.blocks);
    return { group: line.group, run: line.run, kind: 'only', xs: Array.from(ys, (_, block) => block + 1), ys };
  });
  for (const group of new Set(lines.map(line => line.group))) {
    const members = lines.filter(line => line.group === group && line.kind === 'only');
    if (members.length < 2) continue;
    members.forEach(line => {
      line.kind = 'member';
    });
    const { xs } = members[0];
    const ys = xs.map((_, index) => members.reduce((sum, line) => sum + line.ys[index], 0) / members.length);
    lines.push({ group, run: null, kind: 'mean', n: members.length, xs, ys });
  }
  return lines;
}

function formatLineName(data, line) {
  if (line.kind === 'points') return line.groups.map(group => data.groups[group].name).join(', ');
  const name = line.run === null ? `${data.groups[line.group].name}, mean of ${line.n}` : data.runs[line.run].name;
  return line.split ? `${name}, ${line.split}` : name;
}

// Return about `count` round values between two values.
function chooseTicks(low, high, count) {
  const roughStep = (high - low || 1) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(roughStep));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= roughStep * 0.999);
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) ticks.push(index * step);
  return ticks;
}

const formatTick = value =>
  Math.abs(value) >= 1e4 ? `${+(value / 1000).toPrecision(4)}k` : String(+value.toPrecision(5));

// Return the limits of the vertical axis, which contain all values with their standard deviations.
function computeLimits(panel, lines) {
  const values = lines.flatMap(line =>
    Array.from(line.ys).flatMap((y, index) => [y - (line.sds?.[index] ?? 0), y + (line.sds?.[index] ?? 0)]),
  );
  if (panel.rule !== undefined) values.push(panel.rule);
  let low = values.reduce((a, b) => Math.min(a, b), Infinity);
  let high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (panel.label.endsWith('(%)')) {
    low = Math.min(0, Math.max(low, 0));
    high = Math.max(high, 1);
  }
  if (low === 0 && high === 0) high = 1;
  const padding = (high - low || Math.abs(high) || 1) * 0.05;
  return [low >= 0 ? Math.max(0, low - padding) : low - padding, high + padding]; // no axis below 0 without need
}

// Compute the layout of a panel: sizes and ticks in pixels, and functions between values and pixels.
function computeLayout(panel, lines, width) {
  const [low, high] = computeLimits(panel, lines);
  const height = Math.round(Math.min(300, Math.max(190, width * 0.6)));
  const bottom = height - BOTTOM_MARGIN;
  const ticks = chooseTicks(low, high, height / 55);
  const left = 14 + 7 * Math.max(...ticks.map(value => formatTick(value).length));
  const plotWidth = width - left - RIGHT_MARGIN;
  const ends = lines.flatMap(line => [line.xs[0], line.xs[line.xs.length - 1]]);
  const [first, last] = panel.ticks ? [-0.3, panel.ticks.length - 0.7] : [Math.min(...ends), Math.max(...ends)];
  return {
    width,
    height,
    bottom,
    left,
    plotWidth,
    ticks,
    first,
    last,
    bandOpacity: Math.min(0.15, 1 / lines.filter(line => line.kind === 'mean').length),
    toX: value => left + ((value - first) / (last - first || 1)) * plotWidth,
    toY: value => TOP_MARGIN + ((high - value) / (high - low)) * (bottom - TOP_MARGIN),
    fromX: pixel => first + ((pixel - left) / plotWidth) * (last - first),
  };
}

// Render an SVG element; `content` must be escaped.
function renderSvg(name, attributes, content = '') {
  const texts = Object.entries(attributes).map(([key, value]) => ` ${key.replace('_', '-')}="${value}"`);
  return `<${name}${texts.join('')}>${content}</${name}>`;
}

const renderText = (x, y, text, anchor = 'middle') => renderSvg('text', { x, y, text_anchor: anchor }, escapeHtml(text));
const renderTitle = text => renderSvg('title', {}, escapeHtml(text));

function makePath(line, layout) {
  const points = Array.from(line.xs, (x, index) => `${layout.toX(x).toFixed(1)} ${layout.toY(line.ys[index]).toFixed(1)}`);
  return `M${points.join('L')}`;
}

// Render the area between the mean minus and plus one standard deviation.
function renderBand(line, layout) {
  const makeEdge = sign =>
    Array.from(
      line.xs,
      (x, index) => `${layout.toX(x).toFixed(1)} ${layout.toY(line.ys[index] + sign * line.sds[index]).toFixed(1)}`,
    );
  const d = `M${makeEdge(1).join('L')}L${makeEdge(-1).reverse().join('L')}Z`;
  return renderSvg('path', { d, fill: getColour(line.group), opacity: layout.bandOpacity });
}

// Render the vertical bar of a standard deviation.
const renderErrorBar = (x, y, sd, group, layout) =>
  renderSvg('path', { d: `M${x} ${layout.toY(y - sd)}V${layout.toY(y + sd)}`, stroke: getColour(group) });

// Render few values, such as validation losses, as dots over a curve of many.
function renderDots(line, layout) {
  const attributes = { r: 3.5, fill: getColour(line.group), stroke: 'var(--back)', stroke_width: 1.5 };
  return Array.from(line.xs, (value, index) => {
    const x = layout.toX(value);
    const y = line.ys[index];
    const sd = line.sds?.[index];
    const bar = sd ? renderErrorBar(x, y, sd, line.group, layout) : '';
    return bar + renderSvg('circle', { cx: x, cy: layout.toY(y), ...attributes });
  }).join('');
}

function renderLine(data, line, layout) {
  if (line.dots) return renderDots(line, layout);
  const stroke = line.kind === 'points' && line.groups.length > 1 ? 'currentColor' : getColour(line.group);
  const band = line.kind === 'mean' && line.sds ? renderBand(line, layout) : '';
  const attributes = { stroke_dasharray: getDash(line.group), ...LINE_ATTRIBUTES[line.kind] };
  const path = renderSvg('path', { class: 'path', d: makePath(line, layout), stroke, ...attributes });
  return band + path + renderPoints(data, line, layout);
}

// Render the points of a sweep axis in the colours of their groups, hollow if they are published. A line over steps
// has a point only if it has a single value.
function renderPoints(data, line, layout) {
  const getCentre = index => ({ cx: layout.toX(line.xs[index]), cy: layout.toY(line.ys[index]) });
  if (!line.groups)
    return line.xs.length === 1 ? renderSvg('circle', { ...getCentre(0), r: 3, fill: getColour(line.group) }) : '';
  const isPublished = line.kind === 'published';
  return line.groups
    .map((group, index) => {
      const colour = getColour(group);
      const sd = line.sds[index];
      const bar = sd && !isPublished ? renderErrorBar(layout.toX(line.xs[index]), line.ys[index], sd, group, layout) : '';
      const attributes = { r: 4, fill: isPublished ? 'var(--back)' : colour, stroke: colour, stroke_width: 1.5 };
      const value = line.texts?.[index] ?? formatNumber(line.ys[index], 2);
      const title = renderTitle(`${data.groups[group].name}: ${value}${isPublished ? ' (published)' : ''}`);
      return bar + renderSvg('circle', { ...getCentre(index), ...attributes }, title);
    })
    .join('');
}

// Render a triangle where the sink of a visible run emerges.
function renderMarks(data, panel, lines, layout) {
  const visibleRuns = new Set(lines.map(line => line.run));
  const renderMark = mark => {
    const run = data.runs[mark.run];
    const attributes = { class: 'mark', fill: getColour(run.group), stroke: 'var(--back)' };
    const d = `M${layout.toX(mark.x)} ${layout.toY(mark.y) - 6}l5 9h-10z`;
    return renderSvg('path', { d, ...attributes }, renderTitle(`${run.name}: ${mark.text}`));
  };
  return (panel.marks ?? []).filter(mark => visibleRuns.has(mark.run)).map(renderMark).join('');
}

// Return [value, label] of the ticks of the horizontal axis.
function makeHorizontalTicks(panel, layout) {
  if (panel.ticks) {
    const longest = Math.max(...panel.ticks.map(label => label.length));
    const interval = Math.ceil((panel.ticks.length * (14 + 7 * longest)) / layout.plotWidth);
    return panel.ticks.map((label, index) => [index, label]).filter(([index]) => index % interval === 0);
  }
  const values = chooseTicks(layout.first, layout.last, layout.plotWidth / 75);
  return values
    .filter(value => panel.x !== 'block' || Number.isInteger(value))
    .map(value => [value, formatTick(value)]);
}

function renderAxes(panel, layout) {
  const right = layout.width - RIGHT_MARGIN;
  const renderRule = (y, name) =>
    renderSvg('path', { class: name, d: `M${layout.left} ${layout.toY(y)}H${right}` });
  const vertical = layout.ticks.map(
    value => renderRule(value, 'axis') + renderText(layout.left - 6, layout.toY(value) + 4, formatTick(value), 'end'),
  );
  const horizontal = makeHorizontalTicks(panel, layout).map(([value, label]) =>
    renderText(layout.toX(value), layout.bottom + 16, label),
  );
  const rule = panel.rule === undefined ? '' : renderRule(panel.rule, 'cursor');
  const title = renderText((layout.left + right) / 2, layout.height - 4, panel.x);
  return [...vertical, ...horizontal, rule, title].join('');
}

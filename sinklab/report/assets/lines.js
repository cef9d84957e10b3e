// Lines of a panel as SVG. The kind of a panel is 'steps' (over training) or 'blocks' (over the blocks of the model).

// Lines of these kinds are in the legend; others are thin.
const MAIN_KINDS = new Set(['only', 'mean']);
const LINE_ATTRIBUTES = {
  only: { 'stroke-width': 2 },
  mean: { 'stroke-width': 2.5 },
  member: { 'stroke-width': 1, opacity: 0.45 },
};
const RIGHT_MARGIN = 18; // pixels
const BOTTOM_MARGIN = 36;
const TOP_MARGIN = 6;

// Return the lines of a panel with their arrays, without hidden row groups.
function getVisibleLines(panel) {
  return panel.lines.filter(line => !state.hiddenGroups.has(line.group)).map(loadPoints);
}

// Load the arrays of a line. A line by block has values for each of its steps, of which that of the slider is shown.
function loadPoints(line) {
  const [xs, ys, sds] = [line.x, line.y, line.sd].map(array => array && Array.from(decodeArray(array)));
  const start = line.steps ? findLastIndexUpTo(line.steps, state.step) * xs.length : 0;
  return { ...line, xs, ys: ys.slice(start, start + xs.length), sds };
}

function formatLineName(data, line) {
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

// Return the limits of the vertical axis, which contain all finite values with their standard deviations.
function computeLimits(panel, lines) {
  const values = lines.flatMap(line =>
    line.ys.flatMap((y, index) => [y - (line.sds?.[index] ?? 0), y + (line.sds?.[index] ?? 0)]),
  );
  if (panel.reference_value !== undefined) values.push(panel.reference_value);
  const finite = values.filter(Number.isFinite);
  if (!finite.length) return [0, 1];
  let low = finite.reduce((a, b) => Math.min(a, b));
  let high = finite.reduce((a, b) => Math.max(a, b));
  if (panel.label.endsWith('(%)')) {
    low = 0;
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
  const [minX, maxX] = [Math.min(...ends), Math.max(...ends)];
  return {
    width,
    height,
    bottom,
    left,
    plotWidth,
    ticks,
    minX,
    maxX,
    low,
    bandOpacity: Math.min(0.15, 1 / lines.filter(line => line.kind === 'mean').length),
    toX: value => left + ((value - minX) / (maxX - minX || 1)) * plotWidth,
    toY: value => TOP_MARGIN + ((high - value) / (high - low)) * (bottom - TOP_MARGIN),
    fromX: pixel => minX + ((pixel - left) / plotWidth) * (maxX - minX),
  };
}

// Render an SVG element; `content` must be escaped.
function renderSvg(name, attributes, content = '') {
  const texts = Object.entries(attributes).map(([key, value]) => ` ${key}="${value}"`);
  return `<${name}${texts.join('')}>${content}</${name}>`;
}

const renderText = (x, y, text, anchor = 'middle') =>
  renderSvg('text', { x, y, 'text-anchor': anchor }, escapeHtml(text));
const renderTitle = text => renderSvg('title', {}, escapeHtml(text));

const formatPoint = (layout, x, y) => `${layout.toX(x).toFixed(1)} ${layout.toY(y).toFixed(1)}`;

// Return the path of a line through its finite values.
function makePath(line, layout) {
  const indices = [...line.xs.keys()].filter(index => Number.isFinite(line.ys[index]));
  const points = indices.map(index => formatPoint(layout, line.xs[index], line.ys[index]));
  return points.length ? `M${points.join('L')}` : '';
}

// Render the area between the mean minus and plus one standard deviation; that of a rate does not go below 0.
function renderBand(line, layout) {
  const getEdge = (index, sign) => Math.max(layout.low, line.ys[index] + sign * line.sds[index]);
  const makeEdge = sign => line.xs.map((x, index) => formatPoint(layout, x, getEdge(index, sign)));
  const d = `M${makeEdge(1).join('L')}L${makeEdge(-1).reverse().join('L')}Z`;
  return renderSvg('path', { d, fill: getColour(line.group), opacity: layout.bandOpacity });
}

function renderLine(data, line, layout) {
  if (line.dots) return renderPoints(data, line, layout);
  const stroke = getColour(line.group);
  const band = line.kind === 'mean' && line.sds ? renderBand(line, layout) : '';
  const attributes = { 'stroke-dasharray': getDash(line.group), ...LINE_ATTRIBUTES[line.kind] };
  const curve = renderSvg('path', { class: 'curve', d: makePath(line, layout), stroke, ...attributes });
  return band + curve + (line.xs.length === 1 ? renderPoints(data, line, layout) : '');
}

// Render the points of a line with bars of their standard deviations.
function renderPoints(data, line, layout) {
  const colour = getColour(line.group);
  const points = line.xs.map((value, index) => {
    const [x, y, sd] = [layout.toX(value), line.ys[index], line.sds?.[index]];
    const bar = sd ? renderSvg('path', { d: `M${x} ${layout.toY(Math.max(layout.low, y - sd))}V${layout.toY(y + sd)}`, stroke: colour }) : '';
    const title = `${data.groups[line.group].name}: ${formatNumber(y, 2)}`;
    const attributes = { cx: x, cy: layout.toY(y), r: 3.5, fill: colour, stroke: 'var(--back)', 'stroke-width': 1.5 };
    return bar + renderSvg('circle', attributes, renderTitle(title));
  });
  return points.join('');
}

// Return [value, label] of the ticks of the horizontal axis.
function makeHorizontalTicks(panel, layout) {
  const values = chooseTicks(layout.minX, layout.maxX, layout.plotWidth / 75);
  return values
    .filter(value => panel.kind !== 'blocks' || Number.isInteger(value))
    .map(value => [value, formatTick(value)]);
}

function renderAxes(panel, layout) {
  const right = layout.width - RIGHT_MARGIN;
  const renderRule = (y, className) =>
    renderSvg('path', { class: className, d: `M${layout.left} ${layout.toY(y)}H${right}` });
  const vertical = layout.ticks.map(
    value => renderRule(value, 'axis') + renderText(layout.left - 6, layout.toY(value) + 4, formatTick(value), 'end'),
  );
  const horizontal = makeHorizontalTicks(panel, layout).map(([value, label]) =>
    renderText(layout.toX(value), layout.bottom + 16, label),
  );
  const reference = panel.reference_value === undefined ? '' : renderRule(panel.reference_value, 'reference');
  const title = renderText((layout.left + right) / 2, layout.height - 4, panel.x_label);
  return [...vertical, ...horizontal, reference, title].join('');
}

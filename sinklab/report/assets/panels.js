// A panel of lines with a cursor, and the figures that consist of panels.
const MAX_LEGEND_ENTRIES = 12;

class Panel {
  constructor(data, spec, container) {
    Object.assign(this, { data, spec, container });
    container.className = 'panel';
    container.innerHTML = `<h3 title="${escapeHtml(spec.sentence)}">${escapeHtml(spec.label)}</h3>
      <svg role="img"></svg><ul class="legend"></ul>`;
    this.svg = container.querySelector('svg');
    this.legend = container.querySelector('ul');
    this.svg.addEventListener('pointermove', event => this.handlePointer(event));
    this.svg.addEventListener('pointerleave', () => this.resetCursor());
    this.svg.addEventListener('click', event => this.handleClick(event));
  }

  draw() {
    this.lines = getVisibleLines(this.spec);
    if (!this.lines.length) {
      this.layout = null;
      this.svg.removeAttribute('viewBox');
      this.svg.style.height = '2rem';
      this.svg.innerHTML = '<text x="8" y="20">no row is shown</text>';
      this.svg.setAttribute('aria-label', 'no row is shown');
      this.legend.innerHTML = '';
      return;
    }
    const layout = computeLayout(this.spec, this.lines, Math.max(220, this.container.clientWidth));
    this.layout = layout;
    this.svg.setAttribute('viewBox', `0 0 ${layout.width} ${layout.height}`);
    this.svg.style.height = `${layout.height}px`;
    const getOrder = line => MAIN_KINDS.has(line.kind) + 2 * Boolean(line.dots);
    const ordered = [...this.lines].sort((a, b) => getOrder(a) - getOrder(b));
    this.svg.innerHTML = [
      renderAxes(this.spec, layout),
      ...ordered.map(line => renderLine(this.data, line, layout)),
      renderSvg('path', { class: 'cursor' }),
    ].join('');
    this.resetCursor();
  }

  // Move the cursor to the step of the slider, to the chosen layer, or to the last value.
  resetCursor() {
    if (!this.layout) return;
    if (this.spec.kind === 'steps') this.moveCursor(state.step);
    else if (this.spec.kind === 'blocks' && state.layer !== null) this.moveCursor(state.layer + this.layout.minX);
    else this.moveCursor(this.layout.maxX);
  }

  getMainLines() {
    return this.lines.filter(line => MAIN_KINDS.has(line.kind));
  }

  // Return [group, name, value] of each line at a position of the horizontal axis.
  listValues(x) {
    return this.getMainLines().map(line => {
      const index = findNearestIndex(line.xs, x);
      const isOutside = x < line.xs[0] || x > line.xs[line.xs.length - 1];
      const suffix = isOutside ? ` (${this.spec.x_label} ${line.xs[index]})` : '';
      return [line.group, formatLineName(this.data, line), formatNumber(line.ys[index], this.spec.digits) + suffix];
    });
  }

  moveCursor(x) {
    const { layout, spec } = this;
    this.cursorX = Math.round(Math.min(Math.max(x, layout.minX), layout.maxX));
    const cursorPixel = layout.toX(this.cursorX);
    this.svg.querySelector('.cursor').setAttribute('d', `M${cursorPixel} 4V${layout.bottom}`);
    const values = this.listValues(this.cursorX);
    const shown = values.slice(0, MAX_LEGEND_ENTRIES);
    const position = `${spec.x_label} ${this.cursorX}`;
    const items = shown.map(
      ([group, name, value]) => `<li>${renderSwatch(group)}<span>${escapeHtml(name)}</span> <b>${value}</b></li>`,
    );
    if (values.length > shown.length) items.push(`<li>and ${values.length - shown.length} more</li>`);
    this.legend.innerHTML = `<li>${escapeHtml(position)}</li>${items.join('')}`;
    const texts = shown.map(([, name, value]) => `${name} ${value}`).join(', ');
    this.svg.setAttribute('aria-label', `${spec.label} by ${spec.x_label}; at ${position}: ${texts}`);
  }

  getPointerX(event) {
    return this.layout.fromX(event.clientX - this.svg.getBoundingClientRect().left);
  }

  handlePointer(event) {
    if (this.layout) this.moveCursor(this.getPointerX(event));
  }

  handleClick(event) {
    if (this.layout && this.spec.kind === 'steps') controls.goToStep(this.getPointerX(event));
  }
}

// All panels of a figure next to each other.
class LineFigure {
  constructor(data, spec, container) {
    const area = container.appendChild(document.createElement('div'));
    area.className = 'panels';
    this.panels = spec.panels.map(
      panelSpec => new Panel(data, panelSpec, area.appendChild(document.createElement('div'))),
    );
  }

  draw() {
    this.panels.forEach(panel => panel.draw());
  }

  // Values by block depend on the step; other lines only have a cursor.
  updateStep() {
    this.panels.forEach(panel => (panel.spec.kind === 'blocks' ? panel.draw() : panel.resetCursor()));
  }
}

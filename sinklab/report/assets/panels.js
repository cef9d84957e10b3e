// A panel of lines with a cursor, and the figures that consist of panels.
const MAX_LEGEND_ENTRIES = 12;

class Panel {
  constructor(data, panel, box) {
    Object.assign(this, { data, panel, box });
    box.className = 'panel';
    box.innerHTML = `<h3 title="${escapeHtml(panel.sentence)}">${escapeHtml(panel.label)}</h3>
      <svg role="img" tabindex="0"></svg><ul class="legend"></ul>`;
    this.svg = box.querySelector('svg');
    this.legend = box.querySelector('ul');
    this.svg.addEventListener('pointermove', event => this.handlePointer(event));
    this.svg.addEventListener('pointerleave', () => this.resetCursor());
    this.svg.addEventListener('click', event => panel.x === 'step' && controls.goToStep(this.getPointerX(event)));
    this.svg.addEventListener('keydown', event => this.handleKey(event));
  }

  draw() {
    this.lines = getVisibleLines(this.data, this.panel);
    if (!this.lines.length) {
      this.layout = null;
      this.svg.style.height = '2rem';
      this.svg.innerHTML = '<text x="8" y="20">no row is shown</text>';
      this.legend.innerHTML = '';
      return;
    }
    const layout = computeLayout(this.panel, this.lines, Math.max(220, this.box.clientWidth));
    this.layout = layout;
    this.svg.setAttribute('viewBox', `0 0 ${layout.width} ${layout.height}`);
    this.svg.style.height = `${layout.height}px`;
    const getOrder = line => MAIN_KINDS.has(line.kind) + 2 * Boolean(line.dots);
    const ordered = [...this.lines].sort((a, b) => getOrder(a) - getOrder(b));
    this.svg.innerHTML = [
      renderAxes(this.panel, layout),
      ...ordered.map(line => renderLine(this.data, line, layout)),
      renderMarks(this.data, this.panel, this.lines, layout),
      renderSvg('path', { class: 'cursor now' }),
    ].join('');
    this.resetCursor();
  }

  // Move the cursor to the step of the slider, to the chosen layer, or to the last value.
  resetCursor() {
    if (!this.layout) return;
    if (this.panel.x === 'step') this.moveCursor(state.step);
    else if (this.panel.x === 'block' && state.layer) this.moveCursor(state.layer);
    else this.moveCursor(this.layout.last);
  }

  // Return [group, name, value] of each line at a position of the horizontal axis.
  listValues(x) {
    if (!this.panel.ticks) {
      const mainLines = this.lines.filter(line => MAIN_KINDS.has(line.kind));
      return mainLines.map(line => [
        line.group,
        formatLineName(this.data, line),
        this.formatValue(line, findNearestIndex(line.xs, x)),
      ]);
    }
    return this.lines.flatMap(line => {
      const suffix = MAIN_KINDS.has(line.kind) ? '' : ', published';
      return [...line.xs.keys()]
        .filter(index => line.xs[index] === Math.round(x))
        .map(index => [
          line.groups[index],
          this.data.groups[line.groups[index]].name + suffix,
          this.formatValue(line, index),
        ]);
    });
  }

  // Format a value of a line; a step of emergence is an interval, of which the middle is drawn.
  formatValue(line, index) {
    return line.texts?.[index] ?? formatNumber(line.ys[index], this.panel.digits);
  }

  moveCursor(x) {
    const { layout, panel } = this;
    this.cursorX = Math.min(Math.max(x, layout.first), layout.last);
    const position = panel.ticks ? Math.round(this.cursorX) : this.cursorX;
    this.svg.querySelector('.now').setAttribute('d', `M${layout.toX(position)} 4V${layout.bottom}`);
    const values = this.listValues(position);
    const shown = values.slice(0, MAX_LEGEND_ENTRIES);
    const items = shown.map(
      ([group, name, value]) => `<li>${renderSwatch(group)}<span>${escapeHtml(name)}</span> <b>${value}</b></li>`,
    );
    if (values.length > shown.length) items.push(`<li>and ${values.length - shown.length} more</li>`);
    this.legend.innerHTML = items.join('');
    const label = panel.ticks ? panel.ticks[position] : formatTick(position);
    const texts = shown.map(([, name, value]) => `${name} ${value}`).join(', ');
    this.svg.setAttribute('aria-label', `${panel.label} by ${panel.x}; at ${panel.x} ${label}: ${texts}`);
  }

  getPointerX(event) {
    return this.layout ? this.layout.fromX(event.clientX - this.svg.getBoundingClientRect().left) : 0;
  }

  handlePointer(event) {
    if (!this.layout) return;
    const x = this.getPointerX(event);
    this.moveCursor(this.panel.x === 'step' ? x : Math.round(x));
  }

  handleKey(event) {
    const offset = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!offset || !this.layout) return;
    event.preventDefault();
    if (this.panel.x === 'step') controls.moveSlider(offset);
    else this.moveCursor(Math.round(this.cursorX) + offset);
    controls.announce(this.svg.getAttribute('aria-label'));
  }

  renderValues() {
    const lines = this.lines.filter(line => MAIN_KINDS.has(line.kind));
    const xs = [...new Set(lines.flatMap(line => [...line.xs]))].sort((a, b) => a - b);
    const columns = lines.map(line => new Map(Array.from(line.xs, (x, index) => [x, this.formatValue(line, index)])));
    return renderTable(
      [this.panel.x, ...lines.map(line => `${this.panel.label}: ${formatLineName(this.data, line)}`)],
      xs.map(x => [this.panel.ticks ? this.panel.ticks[x] : x, ...columns.map(column => column.get(x) ?? '')]),
    );
  }
}

// All panels of a figure next to each other, or the one that is chosen from a menu.
class LineFigure {
  constructor(data, figure, box) {
    Object.assign(this, { data, figure });
    this.area = document.createElement('div');
    this.area.className = 'panels';
    const hasMenu = figure.kind === 'choice';
    if (hasMenu) box.append(this.makeMenu());
    box.append(this.area);
    this.panels = (hasMenu ? figure.panels.slice(0, 1) : figure.panels).map(panel => this.addPanel(panel));
  }

  addPanel(panel) {
    return new Panel(this.data, panel, this.area.appendChild(document.createElement('div')));
  }

  makeMenu() {
    const menu = document.createElement('select');
    menu.setAttribute('aria-label', 'number');
    menu.innerHTML = this.figure.panels
      .map((panel, index) => `<option value="${index}">${escapeHtml(panel.label)}</option>`)
      .join('');
    menu.addEventListener('change', () => {
      this.area.replaceChildren();
      this.panels = [this.addPanel(this.figure.panels[+menu.value])];
      this.draw();
    });
    return menu;
  }

  draw() {
    this.panels.forEach(panel => panel.draw());
  }

  // Values by block depend on the step; other lines do not.
  updateStep() {
    this.panels.forEach(panel => (panel.panel.x === 'block' ? panel.draw() : panel.resetCursor()));
  }

  renderValues() {
    return this.panels.map(panel => panel.renderValues()).join('<br>');
  }
}

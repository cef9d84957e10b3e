// Maps: a value for each layer and head, or the attention matrix of one head, with one pixel for each value.
const MAX_MAPS = 12; // maps before the button for all is clicked
const MAX_HEADS = 4; // attention matrices of a run if no head is chosen
const DIM_ALPHA = 70; // of 255
const isHeadChosen = () => state.layer !== null || state.head !== null;

class HeatMap {
  constructor(data, figureSpec, spec, container) {
    Object.assign(this, { data, figureSpec, spec, container });
    this.levels = decodeArray(spec.values);
    this.maxLevel = 2 ** (8 * this.levels.BYTES_PER_ELEMENT) - 1;
    this.cell = [0, 0]; // (row, column) under the pointer
    this.isHeadMap = figureSpec.kind === 'heads'; // its first row, layer 0, is at the bottom
    const { rows, columns, first_row, first_column } = spec;
    const renderSpans = (...texts) => texts.map(text => `<span>${text}</span>`).join('');
    const rowEnds = [first_row + rows - 1, first_row]; // of the bottom and of the top
    const [bottom, top] = this.isHeadMap ? rowEnds.reverse() : rowEnds;
    const columnSpans = renderSpans(first_column, figureSpec.column_name, first_column + columns - 1);
    container.className = 'map';
    container.innerHTML = `<figcaption></figcaption><div class="frame">
      <div class="row-axis" aria-hidden="true">${renderSpans(bottom, figureSpec.row_name, top)}</div>
      <canvas role="img" width="${columns}" height="${rows}"></canvas>
      <div class="column-axis" aria-hidden="true">${columnSpans}</div>
      </div><div class="readout"></div>`;
    this.canvas = container.querySelector('canvas');
    this.caption = container.querySelector('figcaption');
    this.readout = container.querySelector('.readout');
    this.canvas.style.setProperty('--aspect', Math.min(1.8, Math.max(0.6, columns / rows)));
    this.canvas.addEventListener('pointermove', event => this.handlePointer(event));
    this.canvas.addEventListener('pointerleave', () => {
      this.readout.textContent = '';
    });
    this.canvas.addEventListener('click', event => {
      this.handlePointer(event); // a tap does not move a pointer before
      this.toggleHead();
    });
  }

  // Return the position of a value between the limits of the scale, from 0 to 1.
  getFraction(row, column) {
    const { rows, columns } = this.spec;
    return this.levels[(this.stepIndex * rows + row) * columns + column] / this.maxLevel;
  }

  getValue(row, column) {
    const { scale_min, scale_max } = this.figureSpec;
    return scale_min + this.getFraction(row, column) * (scale_max - scale_min);
  }

  draw() {
    const { rows, columns, steps } = this.spec;
    this.stepIndex = findLastIndexUpTo(steps, state.step);
    const context = this.canvas.getContext('2d');
    const image = context.createImageData(columns, rows);
    const colours = this.figureSpec.scale_min < 0 ? COLOUR_SCALES.diverging : COLOUR_SCALES.sequential;
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        const level = Math.round(this.getFraction(row, column) * (NUM_LEVELS - 1));
        const pixel = 4 * ((this.isHeadMap ? rows - 1 - row : row) * columns + column);
        for (let channel = 0; channel < 3; channel++) image.data[pixel + channel] = colours[4 * level + channel];
        image.data[pixel + 3] = this.isHeadMap && this.isFilteredOut(row, column) ? DIM_ALPHA : 255;
      }
    }
    context.putImageData(image, 0, 0);
    this.updateLabels();
    if (this.readout.textContent) this.selectCell(...this.cell);
  }

  isFilteredOut(row, column) {
    return (state.layer ?? row) !== row || (state.head ?? column) !== column;
  }

  updateLabels() {
    const { spec } = this;
    const step = spec.steps[this.stepIndex];
    const run = this.data.runs[spec.run];
    const headText = this.isHeadMap ? '' : `, layer ${spec.layer} head ${spec.head}`;
    const stepText = step === state.step ? '' : ` (step ${step})`;
    this.caption.innerHTML = `${renderSwatch(run.group)} ${escapeHtml(run.name + headText + stepText)}`;
    this.canvas.setAttribute('aria-label', `${run.name}${headText}, step ${step}: ${this.figureSpec.label}`);
  }

  formatCell([row, column]) {
    const { row_name, column_name } = this.figureSpec;
    const { first_row, first_column } = this.spec;
    const value = formatNumber(this.getValue(row, column), 3);
    return `${row_name} ${row + first_row}, ${column_name} ${column + first_column}: ${value}`;
  }

  // Select the cell nearest to (row, column), and show its value.
  selectCell(row, column) {
    const { rows, columns } = this.spec;
    this.cell = [Math.min(rows - 1, Math.max(0, row)), Math.min(columns - 1, Math.max(0, column))];
    this.readout.textContent = this.formatCell(this.cell);
  }

  handlePointer(event) {
    const rect = this.canvas.getBoundingClientRect();
    const { rows, columns } = this.spec;
    const row = Math.floor(((event.clientY - rect.top) / rect.height) * rows);
    const column = Math.floor(((event.clientX - rect.left) / rect.width) * columns);
    this.selectCell(this.isHeadMap ? rows - 1 - row : row, column);
  }

  // Show the selected head alone, or all heads if it already is the one that is shown.
  toggleHead() {
    if (!this.isHeadMap) return;
    const [layer, head] = this.cell;
    const isShown = state.layer === layer && state.head === head;
    controls.selectHead(isShown ? null : layer, isShown ? null : head);
  }
}

class MapFigure {
  constructor(data, spec, container) {
    Object.assign(this, { data, spec, showsAll: false, heatMaps: [], cache: new Map() });
    const { scale_min, scale_max } = spec;
    const maxText = `${formatNumber(scale_max, scale_max < 10 ? 2 : 0)} ${escapeHtml(spec.label)}`;
    container.innerHTML = `<div class="scale"><span>${formatNumber(scale_min, 1)}</span>
      <i style="background:${makeGradient(spec)}"></i><span>${maxText}</span></div>
      <div class="maps"></div><p class="message"></p>`;
    this.area = container.querySelector('.maps');
    this.message = container.querySelector('.message');
    this.button = document.createElement('button');
    this.button.type = 'button';
    this.button.addEventListener('click', () => {
      this.showsAll = true;
      requestUpdate('draw');
    });
    container.append(this.button);
  }

  // Return the maps of visible rows. Of matrices, those of the chosen layer and head, or the first few of each run.
  selectMaps() {
    const maps = this.spec.maps.filter(map => !state.hiddenGroups.has(this.data.runs[map.run].group));
    if (this.spec.kind === 'heads') return maps;
    if (isHeadChosen())
      return maps.filter(map => (state.layer ?? map.layer) === map.layer && (state.head ?? map.head) === map.head);
    const counts = new Map();
    return maps.filter(map => {
      counts.set(map.run, (counts.get(map.run) ?? 0) + 1);
      return counts.get(map.run) <= MAX_HEADS;
    });
  }

  draw() {
    const maps = this.selectMaps();
    const drawnMaps = this.showsAll ? maps : maps.slice(0, MAX_MAPS);
    this.heatMaps = drawnMaps.map(map => this.getHeatMap(map));
    this.area.replaceChildren(...this.heatMaps.map(heatMap => heatMap.container));
    this.button.hidden = drawnMaps.length === maps.length;
    this.button.textContent = `all ${maps.length}`;
    // The page contains matrices only of the strongest heads of each run.
    const absence = isHeadChosen() ? 'no matrix of this head is in this page' : 'no row is shown';
    this.message.textContent = maps.length ? '' : absence;
    this.updateStep();
  }

  getHeatMap(map) {
    if (!this.cache.has(map))
      this.cache.set(map, new HeatMap(this.data, this.spec, map, document.createElement('figure')));
    return this.cache.get(map);
  }

  updateStep() {
    this.heatMaps.forEach(heatMap => heatMap.draw());
  }
}

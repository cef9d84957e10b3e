// Controls of the whole page: slider of steps; filters by row, layer and head.
class Controls {
  constructor(data) {
    this.data = data;
    this.initSlider();
    this.initGroupFilter();
    this.initFilter('layer', 'rows');
    this.initFilter('head', 'columns');
    document.addEventListener('keydown', event => this.handleKey(event));
    document.querySelector('.controls').hidden = false;
  }

  initSlider() {
    const slider = getElement('step');
    const last = Math.max(0, this.data.steps.length - 1);
    slider.closest('label').hidden = !last;
    slider.max = last;
    slider.setAttribute('aria-keyshortcuts', '[ ]');
    slider.addEventListener('input', () => this.moveSlider(0));
    this.moveSlider(last);
  }

  // Move the slider by a number of probes, and update all figures.
  moveSlider(offset) {
    const slider = getElement('step');
    slider.value = +slider.value + offset;
    const step = this.data.steps[+slider.value];
    state.step = step ?? Infinity;
    getElement('step-value').textContent = step ?? '';
    slider.setAttribute('aria-valuetext', `step ${step}`);
    requestUpdate('updateStep');
  }

  goToStep(step) {
    getElement('step').value = findNearestIndex(this.data.steps, step);
    this.moveSlider(0);
  }

  handleKey(event) {
    const offset = { '[': -1, ']': 1 }[event.key];
    if (offset && !event.metaKey && !event.target.matches('input[type="search"], select')) this.moveSlider(offset);
  }

  // Fill the menu of layers or heads up to the largest size of a map along an axis.
  initFilter(name, axis) {
    const menu = getElement(name);
    const maps = this.data.figures.filter(figure => figure.kind === 'heads').flatMap(figure => figure.maps);
    const count = Math.max(0, ...maps.map(map => map[axis]));
    const options = Array.from({ length: count }, (_, index) => `<option>${index}</option>`);
    menu.closest('label').hidden = !count;
    menu.insertAdjacentHTML('beforeend', options.join(''));
    menu.addEventListener('change', () => {
      state[name] = menu.value === '' ? null : +menu.value;
      requestUpdate('draw');
    });
  }

  // Show one head, or all for null.
  selectHead(layer, head) {
    Object.assign(state, { layer, head });
    getElement('layer').value = layer ?? '';
    getElement('head').value = head ?? '';
    requestUpdate('draw');
  }

  initGroupFilter() {
    const { groups } = this.data;
    const labels = groups.map(
      (group, index) =>
        `<label><input type="checkbox" checked value="${index}">${renderSwatch(index)}${escapeHtml(group.name)}</label>`,
    );
    getElement('group-list').innerHTML = labels.join('');
    getElement('group-list').addEventListener('change', () => this.updateGroups());
    getElement('group-search').addEventListener('input', () => {
      const words = getElement('group-search').value.toLowerCase().split(' ').filter(Boolean);
      this.checkGroups(index => words.every(word => groups[index].name.toLowerCase().includes(word)));
    });
    getElement('group-filter').hidden = groups.length < 2;
    getElement('group-filter').open = groups.length > 1 && groups.length <= 6 && innerWidth > 700;
    this.hideUncheckedGroups();
  }

  getCheckboxes() {
    return [...getElement('group-list').querySelectorAll('input')];
  }

  checkGroups(isChecked) {
    this.getCheckboxes().forEach((checkbox, index) => {
      checkbox.checked = isChecked(index);
    });
    this.updateGroups();
  }

  updateGroups() {
    this.hideUncheckedGroups();
    requestUpdate('draw');
  }

  hideUncheckedGroups() {
    const numGroups = this.data.groups.length;
    const unchecked = this.getCheckboxes().filter(checkbox => !checkbox.checked);
    state.hiddenGroups = new Set(unchecked.map(checkbox => +checkbox.value));
    getElement('group-count').textContent = `(${numGroups - state.hiddenGroups.size} of ${numGroups})`;
    document.querySelectorAll('tr[data-group]').forEach(row => {
      row.hidden = state.hiddenGroups.has(+row.dataset.group);
    });
  }
}

// Curves by uPlot: one canvas per metric, cursors in step.
import { html, useRef, useLayoutEffect } from "./vendor/preact.js";
import { fmt } from "./lib.js";

const SERIES = ["--accent", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6"];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const WHOLE = Array.from({ length: 9 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat(); // distances of ticks: a step has no half
const FONT = "11px Inter, system-ui, sans-serif";

function compact(value) {
  if (value < 0) return `−${compact(-value)}`;
  if (value >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (value >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  return value !== 0 && value < 1e-3 ? value.toExponential(0) : String(Number(value.toPrecision(4)));
}

// Ends of the axis of values; a constant curve has an axis of its own size.
export const bounds = (low, high) => (low === high ? [low - Math.abs(low) / 2, high + (Math.abs(high) / 2 || 1)] : window.uPlot.rangeNum(low, high, 0.1, true));

// One chart; `series` is [{ name, values }], `stacked` adds the values up as areas, `marks` are steps to mark.
export function Chart({ title, about = title, steps, series, stacked, theme, height = 132, marks = [], onStep }) {
  const box = useRef(null);
  const legend = useRef(null);
  useLayoutEffect(() => {
    if (!window.uPlot || !steps.length) return;
    const values = stacked ? accumulate(series.map((one) => one.values)) : series.map((one) => one.values);
    const axis = { stroke: css("--faint"), font: FONT, grid: { stroke: css("--line"), width: 1 }, ticks: { show: false } };
    const drawn = series.map((one, place) => {
      const colour = css(SERIES[place % SERIES.length]);
      const few = one.values.filter((value) => value !== null).length <= 24;
      return { label: one.name, stroke: colour, width: stacked ? 0.5 : 1.5, fill: stacked ? `color-mix(in oklab, ${colour} 62%, ${css("--panel")})` : undefined, spanGaps: true, points: { show: few && !stacked, size: 4, fill: colour } };
    });
    const write = (plot, place) => {
      if (!legend.current) return;
      const at = place ?? lastOf(series[0].values);
      const texts = series.map((one) => fmt(one.values[at]));
      legend.current.textContent = place === null || place === undefined ? texts[0] : `step ${steps[at]}: ${texts[0]}`;
    };
    const options = {
      width: box.current.clientWidth,
      height,
      padding: [8, 6, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "steps" }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: (plot, low, high) => (stacked ? [0, high * 1.06 || 1] : bounds(low, high)) } },
      axes: [
        { ...axis, size: 20, gap: 2, grid: { show: false }, space: 60, incrs: WHOLE },
        { ...axis, size: 44, gap: 4, space: 28, values: (plot, ticks) => ticks.map((tick) => compact(tick)) },
      ],
      series: [{}, ...(stacked ? drawn.toReversed() : drawn)],
      hooks: {
        setCursor: [(plot) => write(plot, plot.cursor.idx)],
        draw: [(plot) => {
          plot.ctx.save();
          plot.ctx.fillStyle = css("--neg");
          for (const step of marks) plot.ctx.fillRect(plot.valToPos(step, "x", true) - 1, plot.bbox.top, 2, 5);
          plot.ctx.restore();
        }],
      },
    };
    const plot = new window.uPlot(options, [steps, ...(stacked ? values.toReversed() : values)], box.current);
    if (onStep) plot.over.addEventListener("click", () => plot.cursor.idx !== null && onStep(steps[plot.cursor.idx]));
    write(plot, null);
    const observer = new ResizeObserver(() => plot.setSize({ width: box.current.clientWidth, height }));
    observer.observe(box.current);
    return () => {
      observer.disconnect();
      plot.destroy();
    };
  }, [steps, series.map((one) => one.values), theme, stacked].flat());
  return html`<figure class="chart card" role="img" aria-label=${`${title}: ${fmt(series[0]?.values[lastOf(series[0].values)])} at the last step`}>
    <figcaption class="row"><span class="ellipsis grow" title=${about}>${title}</span>${!stacked && html`<span class="num muted" ref=${legend}></span>`}</figcaption>
    <div ref=${box}></div>
    ${(stacked || series.length > 1) && html`<div class="legend">${series.map((one, place) => html`<span key=${one.name}><i style=${{ background: `var(${SERIES[place % SERIES.length]})` }}></i>${one.name}</span>`)}</div>`}
  </figure>`;
}

function lastOf(values) {
  let place = values.length - 1;
  while (place > 0 && (values[place] === null || values[place] === undefined)) place--;
  return place;
}

function accumulate(columns) {
  const sums = columns[0].map(() => 0);
  return columns.map((values) => values.map((value, place) => (sums[place] += value || 0)));
}

// A line of a few values without axes, as SVG; values are shares from 0 to 1.
export function Spark({ values, steps, width = 120, height = 22 }) {
  const known = values.map((value, place) => [steps ? steps[place] : place, value]).filter(([, value]) => value !== null);
  if (!known.length) return html`<span class="faint">–</span>`;
  const low = known[0][0];
  const span = known[known.length - 1][0] - low || 1;
  const points = known.map(([step, value]) => [3 + ((step - low) / span) * (width - 6), height - 3 - value * (height - 6)]);
  return html`<svg class="spark" width=${width} height=${height} viewBox="0 0 ${width} ${height}" role="img" aria-label=${known.map(([, value]) => fmt(value)).join(", ")}>
    <line x1="0" x2=${width} y1=${height - 3} y2=${height - 3} stroke="var(--line)" />
    <polyline points=${points.map((point) => point.join(",")).join(" ")} fill="none" stroke="var(--accent)" stroke-width="1.5" stroke-linejoin="round" />
    ${points.map(([x, y], place) => html`<circle key=${place} cx=${x} cy=${y} r=${points.length > 40 ? 0 : 1.8} fill="var(--accent)" />`)}</svg>`;
}

// For each line {frames, transformations} of stdin, writes a line of what Grafana's panels would be given, and whether Trend
// would draw it. The transformations are Grafana's own; it registers them by itself in a browser.
const { createInterface } = require("node:readline");
const data = require("@grafana/data");

globalThis.window = {}; // only now: while it loads, the package would take it for a browser

const all = Object.values(data.standardTransformers).filter((one) => one?.id);
const unique = [...new Map(all.map((one) => [one.id, one])).values()];
data.standardTransformersRegistry.setInit(() =>
  unique.map((one) => ({ id: one.id, name: one.name, transformation: () => Promise.resolve(one) }))
);

function transformed(frames, transformations) {
  return new Promise((resolve, reject) => {
    const ready = frames.map((frame) => data.toDataFrame(frame));
    data.transformDataFrame(transformations, ready).subscribe({ next: resolve, error: reject });
  });
}

async function main() {
  for await (const line of createInterface({ input: process.stdin })) {
    const { frames, transformations } = JSON.parse(line);
    const found = await transformed(frames, transformations);
    const told = found.map((frame) =>
      frame.fields.map((field) => ({
        name: data.getFieldDisplayName(field, frame, found),
        type: field.type,
        values: Array.from(field.values),
        ascends: field.type === "number" && data.isLikelyAscendingVector(field.values),
      }))
    );
    process.stdout.write(`${JSON.stringify(told)}\n`);
  }
}

main();

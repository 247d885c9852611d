// The stacks of a run's model: what each layer of a metric is, and where a stack begins. The service says where the stacks lie.

/** Whether a metric with so many layers is one of activations, which has a layer for the input of each stack. */
const hasInputs = (run, numLayers) => numLayers === run.num_blocks + run.stacks.length;

/** The first layer of each stack, in a metric with so many layers; only layer 0 if they are of another model, of an earlier attempt. */
export function firstLayers(run, numLayers) {
  if (hasInputs(run, numLayers)) return run.stacks.map((stack) => stack.first_state);
  return numLayers === run.num_blocks ? run.stacks.map((stack) => stack.first_block) : [0];
}

/** What a layer is called: "decoder 3", or "3" in a model with one stack. */
export function layerLabel(layer, run, numLayers) {
  const firsts = firstLayers(run, numLayers);
  if (firsts.length < 2) return `${layer}`;
  const stack = firsts.findLastIndex((first) => first <= layer);
  return `${run.stacks[stack].name} ${layer - firsts[stack]}`;
}

/** The block of a layer, or that it is the input of one. */
export function blockOf(layer, run, numLayers) {
  const { blocks } = run;
  if (!hasInputs(run, numLayers)) return blocks[layer] ?? `layer ${layer}`;
  const stack = run.stacks.findLastIndex(({ first_state }) => first_state <= layer);
  const next = layer - stack; // as many inputs lie before it, its own stack's not among them
  return layer === run.stacks[stack].first_state ? `input of ${blocks[next] ?? "the first block"}` : (blocks[next - 1] ?? `layer ${layer}`);
}

/** The layer that a block writes, in a metric with so many layers. */
export function layerOfBlock(block, run, numLayers) {
  const inputs = hasInputs(run, numLayers) ? run.stacks.filter(({ first_block }) => first_block <= block).length : 0;
  return Math.min(block + inputs, numLayers - 1);
}

/** Both. */
export const layerTitle = (layer, run, numLayers) => `${layerLabel(layer, run, numLayers)} · ${blockOf(layer, run, numLayers)}`;

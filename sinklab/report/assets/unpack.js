// Unpack the payload of sinklab/report/figure_data.py: a JSON header, and the arrays that it refers to.
const ARRAY_TYPES = { f4: Float32Array, i4: Int32Array, u1: Uint8Array, u2: Uint16Array };

// Return the header, with a function `getArray` that returns the array of a reference [dtype, offset, size].
async function unpackPayload(base64) {
  const binary = atob(base64);
  const compressed = Uint8Array.from(binary, character => character.charCodeAt(0));
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream('gzip'));
  const buffer = await new Response(stream).arrayBuffer();
  const headerLength = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, headerLength)));
  header.getArray = ([dtype, offset, size]) => new ARRAY_TYPES[dtype](buffer, 4 + headerLength + offset, size);
  return header;
}

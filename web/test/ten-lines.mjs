import { writeFile } from 'node:fs/promises';
import { Model, Trainer } from 'elapid';

const text = 'fn add(a: i32, b: i32) -> i32 {\n    a + b\n}\n'.repeat(50);
const model = await Model.create({ arch: 'llama', preset: 'tiny', vocabulary: text });
for await (const { step, loss } of new Trainer(model, { context: 32 }).train(text, { steps: 3 })) {
  console.log(`step ${step} loss ${loss.toFixed(3)}`);
}
console.log(await model.generate('fn add(', { maxTokens: 8, temperature: 0 }).text());
await writeFile('model.gguf', Buffer.from(await (await model.save('gguf')).arrayBuffer()));

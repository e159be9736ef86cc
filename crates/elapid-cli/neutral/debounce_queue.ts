/** Work that arrives in bursts, done one piece at a time, the newest of each key only. */

export type Task<T> = (signal: AbortSignal) => Promise<T>;

export interface QueueOptions {
  /** Milliseconds of silence before a task starts. */
  readonly delay: number;
  /** Tasks that may run side by side. */
  readonly concurrency: number;
  readonly onError?: (key: string, error: unknown) => void;
}

interface Waiting<T> {
  readonly key: string;
  readonly task: Task<T>;
  readonly controller: AbortController;
  readonly resolve: (value: T) => void;
  readonly reject: (reason: unknown) => void;
  timer: ReturnType<typeof setTimeout> | null;
}

export class Superseded extends Error {
  constructor(key: string) {
    super(`a newer task took the place of "${key}"`);
    this.name = 'Superseded';
  }
}

export class DebounceQueue<T> {
  private readonly waiting = new Map<string, Waiting<T>>();
  private readonly running = new Map<string, Waiting<T>>();
  private readonly ready: Waiting<T>[] = [];

  constructor(private readonly options: QueueOptions) {
    if (options.concurrency < 1) {
      throw new RangeError(`concurrency must be at least 1, got ${options.concurrency}`);
    }
  }

  get size(): number {
    return this.waiting.size + this.ready.length + this.running.size;
  }

  /** Adds a task; one that waits or runs under the same key is given up. */
  push(key: string, task: Task<T>): Promise<T> {
    this.cancel(key, new Superseded(key));
    return new Promise<T>((resolve, reject) => {
      const entry: Waiting<T> = {
        key,
        task,
        controller: new AbortController(),
        resolve,
        reject,
        timer: null,
      };
      entry.timer = setTimeout(() => this.promote(entry), this.options.delay);
      this.waiting.set(key, entry);
    });
  }

  cancel(key: string, reason: unknown = new Error('cancelled')): boolean {
    const waiting = this.waiting.get(key);
    if (waiting) {
      if (waiting.timer !== null) {
        clearTimeout(waiting.timer);
      }
      this.waiting.delete(key);
      waiting.reject(reason);
      return true;
    }
    const index = this.ready.findIndex((entry) => entry.key === key);
    if (index >= 0) {
      const [entry] = this.ready.splice(index, 1);
      entry.reject(reason);
      return true;
    }
    const running = this.running.get(key);
    running?.controller.abort(reason);
    return running !== undefined;
  }

  async drain(): Promise<void> {
    while (this.size > 0) {
      await new Promise((resolve) => setTimeout(resolve, Math.max(1, this.options.delay)));
    }
  }

  private promote(entry: Waiting<T>): void {
    this.waiting.delete(entry.key);
    this.ready.push(entry);
    this.advance();
  }

  private advance(): void {
    while (this.running.size < this.options.concurrency) {
      const index = this.ready.findIndex((entry) => !this.running.has(entry.key));
      if (index < 0) {
        return;
      }
      const [entry] = this.ready.splice(index, 1);
      void this.run(entry);
    }
  }

  private async run(entry: Waiting<T>): Promise<void> {
    this.running.set(entry.key, entry);
    try {
      const value = await entry.task(entry.controller.signal);
      entry.controller.signal.throwIfAborted();
      entry.resolve(value);
    } catch (error: unknown) {
      this.options.onError?.(entry.key, error);
      entry.reject(error);
    } finally {
      this.running.delete(entry.key);
      this.advance();
    }
  }
}

// A run whose budget is time: when the learning rate begins to fall, and which step is the last.
// The same rules as those of `elapid train --minutes`.

const DECAY = 0.2;
const TOLERANCE = 0.01;
const WINDOW = 0.1;

export class Pace {
  constructor(budget, end) {
    this.budget = budget;
    this.target = 0.99 * budget;
    this.end = end;
    this.marks = [];
    this.decided = 0;
  }

  /** Hears that `step` steps are made after `now` seconds; a new end where one is due. */
  hear(now, step) {
    this.marks.push([now, step]);
    const window = WINDOW * this.budget;
    while (this.marks.length > 1 && this.marks[1][0] <= now - window) this.marks.shift();
    if (now >= this.target) return this.decide(now, step);
    const [first] = this.marks;
    if (step === first[1]) return undefined;
    const seconds = (now - first[0]) / (step - first[1]);
    const fitting = step + Math.round(Math.max(0, (this.target - now) / seconds));
    this.estimate = fitting;
    const slack = TOLERANCE * this.budget;
    const isDue =
      this.end === undefined
        ? this.target - now <= DECAY * this.target
        : Math.abs(fitting - this.end) * seconds > slack && now - this.decided > slack;
    return isDue ? this.decide(now, Math.max(fitting, step + 1)) : undefined;
  }

  decide(now, end) {
    if (end === this.end) return undefined;
    this.decided = now;
    this.end = end;
    return end;
  }
}

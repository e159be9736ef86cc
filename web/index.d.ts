/**
 * Elapid in the browser and in node: small language models that are trained, adapted, measured and
 * run where the page is. Nothing is uploaded.
 *
 * ```js
 * import { Model, Trainer } from 'elapid';
 *
 * const model = await Model.load('models/elapid-code-small.gguf');
 * for await (const token of model.generate('fn main() {', { maxTokens: 32 })) {
 *   console.log(token.text);
 * }
 * ```
 *
 * The engine runs in a worker of its own; what is called here sends messages to it and never blocks
 * the page. In node there is no worker unless `init({ worker: true })` asks for one.
 * Calls on one model are answered one after the other, in the order in which they were made.
 *
 * @module elapid
 */

// ---------------------------------------------------------------------------------------------
// Start

/** How the engine is started. Everything has a default; `init` is called by the first use. */
export interface InitOptions {
  /** The wasm file: its address or its bytes. Default: `elapid_bg.wasm` beside this module. */
  wasm?: string | URL | ArrayBuffer | Uint8Array;
  /**
   * Whether the engine runs in a worker. Default: true in a browser, false in node and where there
   * are no workers. Without one every call blocks the thread that makes it.
   */
  worker?: boolean;
}

/** Starts the engine. Only needed to choose options; a second call has no effect. */
export function init(options?: InitOptions): Promise<void>;

/** Ends the worker and frees all memory of the engine. What is called afterwards starts anew. */
export function shutdown(): void;

/** The version of this package. */
export const version: string;

// ---------------------------------------------------------------------------------------------
// Errors

/** What kind of error it is; each has a class of its own. */
export type ErrorCode =
  | 'unknown_family'
  | 'config'
  | 'format'
  | 'missing_tensor'
  | 'extra_tensor'
  | 'wrong_shape'
  | 'no_match'
  | 'input'
  | 'diverged'
  | 'out_of_memory'
  | 'device_lost'
  | 'device'
  | 'read'
  | 'write'
  | 'defect';

/** Every error of the engine. An aborted call throws the signal's `reason` instead. */
export class ElapidError extends Error {
  readonly code: ErrorCode;
  /** What to do about it, in one sentence; may be empty. */
  readonly hint: string;
}
/** A file does not follow its format, or its parts do not belong together. */
export class FormatError extends ElapidError {}
/** A configuration that is not supported: family, key or value. */
export class ConfigError extends ElapidError {}
/** An argument, a text or a length that cannot be taken. */
export class InputError extends ElapidError {}
/** A loss that is not finite. Nothing was changed by the step. */
export class DivergedError extends ElapidError {}
/** The device has no memory for what was asked. */
export class OutOfMemoryError extends ElapidError {}
/** There is no such device, or it cannot do what is needed. */
export class DeviceError extends ElapidError {}
/** The GPU is gone. Load the model again, or continue from a checkpoint. */
export class DeviceLostError extends DeviceError {}
/** Something cannot be fetched, read or stored. */
export class StorageError extends ElapidError {}
/** A defect of Elapid; please report it. The engine must be started again (`shutdown`). */
export class DefectError extends ElapidError {}

// ---------------------------------------------------------------------------------------------
// Devices

/** `auto` is WebGPU where there is an adapter, else the CPU. */
export type DeviceName = 'auto' | 'cpu' | 'webgpu';

/** A device that the engine can use. */
export interface DeviceInfo {
  id: 'cpu' | 'webgpu';
  /** For people, for example `wasm, simd128` or the name of the adapter. */
  name: string;
  /** Largest buffer, in bytes; only of a GPU. */
  bufferBytesMax?: number;
  /** Largest binding of a kernel, in bytes; only of a GPU. */
  bindingBytesMax?: number;
  /** Optional abilities, and whether they are used. */
  features: Record<string, boolean>;
  /** Whether it computes in software (SwiftShader, llvmpipe): slower than the CPU here. */
  isSoftware?: boolean;
}

/** The devices that are there; the CPU always is. */
export function devices(): Promise<DeviceInfo[]>;

/** A kernel's source. */
export interface Kernel {
  /** Its path in the engine, for example `ops/adamw.wgsl`. */
  path: string;
  source: string;
}

/** The WGSL sources of all kernels. */
export function kernels(): Promise<Kernel[]>;

// ---------------------------------------------------------------------------------------------
// Models

/** Bytes, or something that holds them. */
export type Bytes = ArrayBuffer | Uint8Array | Blob;

/**
 * A model or an adapter: an address (fetched), the bytes of a GGUF file or a package, or the files
 * of a directory (`config.json`, `model.safetensors`, `tokenizer.json`, ...), by name or as `File`s.
 */
export type Source = string | URL | Bytes | Record<string, Bytes> | Iterable<File>;

/** How a model is loaded. */
export interface LoadOptions {
  /** Default `auto`. */
  device?: DeviceName;
  /** An adapter (PEFT files or a GGUF adapter) that is put on the model. */
  adapter?: Source;
  /** Its name in messages; default the file's. */
  name?: string;
  /** Hears of bytes read and, where it is known, of all. */
  onProgress?: (bytes: number, bytesAll: number | undefined) => void;
  signal?: AbortSignal;
}

/** List of layers of a new model. */
export type Arch =
  | 'mamba1' | 'mamba2' | 'mamba3' | 'hybrid' | 'zamba' | 'evermind' | 'llama' | 'moe';

/** About 3, 12, 30 and 130 million parameters. */
export type Preset = 'tiny' | 'small' | 'base' | 'medium';

/** What a new model looks like. */
export interface CreateOptions {
  /** Default `hybrid`. */
  arch?: Arch;
  /** Default `tiny`. */
  preset?: Preset;
  /** Longest sequence it is made for, in tokens. Default 256. */
  context?: number;
  /** Texts that its vocabulary is made from, or a tokenizer that it takes over. */
  vocabulary: string | string[] | TextFile[] | Tokenizer;
  /** Tokens of a new vocabulary; default by the size of the texts and the preset. */
  vocabularySize?: number;
  /** Of the first weights. Default 0. */
  seed?: number;
  device?: DeviceName;
}

/** What a model is. */
export interface ModelInfo {
  name: string;
  /** For example `llama` or `bamba`. */
  family: string;
  parameters: number;
  layers: number;
  vocabulary: number;
  /** Longest sequence it was made for, in tokens, where the files say it. */
  context?: number;
  /** Bytes of the weights as they are stored. */
  bytes: number;
  /** Types of the stored weights, for example `["f32", "q4_k"]`. */
  types: string[];
  device: DeviceInfo;
  /** Whether it can answer messages (a chat template). */
  canChat: boolean;
  /** Whether its vocabulary has tokens for `fill`. */
  canFill: boolean;
}

/** A message of a conversation. */
export interface Message {
  role: 'system' | 'user' | 'assistant' | (string & {});
  content: string;
}

/** How an answer is made. */
export interface GenerateOptions {
  /** Default 256. */
  maxTokens?: number;
  /** 0 is greedy. Default: what the model's files suggest, else 0.8. */
  temperature?: number;
  topK?: number;
  topP?: number;
  minP?: number;
  repeatPenalty?: number;
  /** Of the draws; the same seed gives the same text. Default 0. */
  seed?: number;
  /** The answer ends before any of these texts. */
  stop?: string | string[];
  /** Ends the answer; the iterator then throws the signal's reason. */
  signal?: AbortSignal;
}

/** One token of an answer. */
export interface Token {
  id: number;
  /** May be empty where a character or a stop text is not complete yet. */
  text: string;
}

/** Why an answer ended. */
export type FinishReason = 'end' | 'stop' | 'length';

/** What is known of an answer once it has ended. */
export interface Finish {
  reason: FinishReason;
  /** Tokens of the prompt, and how many of them were read from the cache. */
  promptTokens: number;
  cachedTokens: number;
  tokens: number;
  /** Seconds until the first token, and tokens per second after it. */
  promptSeconds: number;
  tokensPerSecond: number;
}

/** An answer as it is made. Leaving the loop (`break`) ends it. */
export interface Generation extends AsyncIterableIterator<Token> {
  /** The rest of the answer as one text. */
  text(): Promise<string>;
  /** Set once the answer has ended. */
  readonly finish: Finish | undefined;
}

/** Form of a saved model: see `Model.save`. */
export type SaveFormat = 'gguf' | 'package' | 'adapter' | 'adapter-gguf' | 'safetensors';

/** How a model is saved. */
export interface SaveOptions {
  /** Type of the matrices, for example `q8_0` or `q4_k_m`; default as they are. */
  quant?: string;
}

/** A model on a device. */
export class Model {
  private constructor();
  /** Loads a model. A file that is not one throws `FormatError`. */
  static load(source: Source, options?: LoadOptions): Promise<Model>;
  /** A new model with random weights. */
  static create(options: CreateOptions): Promise<Model>;

  readonly info: ModelInfo;
  readonly tokenizer: Tokenizer;

  /** Continues a text, or answers messages by the model's chat template. */
  generate(prompt: string | Message[], options?: GenerateOptions): Generation;
  /** Fills the gap between two texts; `info.canFill` says whether the model can. */
  fill(prefix: string, suffix: string, options?: GenerateOptions): Generation;
  /** One vector of length 1 for each text. */
  embed(text: string): Promise<Float32Array>;
  embed(texts: string[]): Promise<Float32Array[]>;
  /** How well the model predicts a text. For many, and for intervals, see `evaluate`. */
  score(text: string, options?: EvaluateOptions): Promise<TextScore>;
  /** Reads a prompt once; what is generated from the snapshot starts there. */
  snapshot(prompt: string): Promise<Snapshot>;

  /**
   * The model as a file, with what was trained: `gguf` for Elapid and llama.cpp, `package` for
   * Elapid (one `.elapid` file), `adapter` (a zip of the PEFT directory) and `adapter-gguf` for what
   * a method other than `full` trained, `safetensors` (a zip of the directory for transformers).
   * Default: an adapter where one was trained, else `gguf`.
   */
  save(format?: SaveFormat, options?: SaveOptions): Promise<Blob>;
  /** The same by file name, without a zip. */
  files(format?: SaveFormat, options?: SaveOptions): Promise<Record<string, Uint8Array>>;

  /** Frees its memory. It cannot be used afterwards. */
  free(): void;
}

/** A prompt that was read. */
export interface Snapshot {
  readonly tokens: number;
  /** Continues it with `text`: the same answer as reading everything anew. */
  generate(text: string, options?: GenerateOptions): Generation;
}

// ---------------------------------------------------------------------------------------------
// Tokenizers

/** How a vocabulary is made. */
export interface TokenizerTraining {
  /** Tokens, the special ones among them. Default 4096. */
  size?: number;
  /** Pairs that come less often are not joined. Default 2. */
  minCount?: number;
  /** Default: an end token, those of fill-in-the-middle and of projects. */
  specials?: string[];
}

/** Text to token ids and back. */
export class Tokenizer {
  private constructor();
  /** Reads a `tokenizer.json`, or takes that of a GGUF file. */
  static load(source: Source): Promise<Tokenizer>;
  /** Makes a byte-level BPE vocabulary. */
  static train(texts: string | string[] | TextFile[], options?: TokenizerTraining): Promise<Tokenizer>;

  /** Tokens. */
  readonly size: number;
  /** Special tokens in the text are read as such only where `special` is true. */
  encode(text: string, options?: { special?: boolean }): Promise<Uint32Array>;
  decode(ids: ArrayLike<number>): Promise<string>;
  /** As `tokenizer.json`. */
  toJSON(): Promise<string>;
  free(): void;
}

// ---------------------------------------------------------------------------------------------
// Training

/** A text with a name; its language and project are told by the name. */
export interface TextFile {
  name: string;
  text: string;
}

/** What is learned or measured: texts, texts with names, or files that are read as UTF-8. */
export type Texts = string | string[] | TextFile[] | Iterable<File>;

/** What is trained: all parameters, adapters, what makes B and C of Mamba layers, embeddings. */
export type Method = 'full' | 'lora' | 'dora' | 'bc' | 'embeddings';

/** How a model is trained. */
export interface TrainerOptions {
  /** Default `full` for a new model, `lora` for a loaded one. */
  method?: Method;
  /** Highest learning rate. Default 1e-3 for new models, 4e-4 for LoRA, 1e-4 for `full` on others. */
  lr?: number;
  /** Rows of a step. Default 8. */
  batch?: number;
  /** Tokens of a row. Default 128. */
  context?: number;
  /** Batches whose gradients are added before a step. Default 1. */
  accumulate?: number;
  optimizer?: 'adamw' | 'muon';
  weightDecay?: number;
  beta1?: number;
  beta2?: number;
  /** Gradients are scaled down to this norm; 0 does not clip. Default 1. */
  clip?: number;
  /** Share of the steps with a rising rate; default 0.05. */
  warmup?: number;
  /** Default `cosine`, with `minutes` `wsd`: constant, then falling in the last fifth. */
  schedule?: 'cosine' | 'wsd' | 'constant';
  /** Share of documents turned for fill-in-the-middle, where the vocabulary has its tokens. */
  fim?: number;
  /** Of LoRA and DoRA. Default 16. */
  rank?: number;
  /** Of LoRA and DoRA. Default twice the rank. */
  alpha?: number;
  /** Of LoRA and DoRA: share of inputs that are dropped. Default 0. */
  dropout?: number;
  /** Of LoRA and DoRA: names of modules, for example `q_proj`. Default: all that other tools load. */
  targets?: string[];
  /** Stores the frozen matrices in blocks of few bits: `nf4`, `q4_0`, `q8_0`, `q4_k`. */
  quant?: string;
  /** Of order, adapters and dropout. Default 0. */
  seed?: number;
}

/** Where a run is kept, so that it continues after the tab was closed. */
export interface CheckpointOptions {
  /**
   * Name of the run in the origin's private file system; in node the path of a file. Where a
   * checkpoint of this name lies, the run continues from it, to the bit: the same model, texts and
   * options must be given (other ones throw `FormatError` or `InputError`).
   */
  name: string;
  /** Steps between two checkpoints. Default 50. One is written at the end and on abort, too. */
  every?: number;
}

/** How long, and what happens meanwhile. One of `steps`, `epochs` and `minutes`. */
export interface TrainOptions {
  steps?: number;
  epochs?: number;
  /** Until this time has passed; the learning rate falls by the clock. */
  minutes?: number;
  checkpoint?: CheckpointOptions;
  /** A checkpoint made by `Training.checkpoint`, to continue from. */
  resume?: Bytes;
  /** Held-out texts that are measured every so many steps (`evalEvery`, default 50), and last. */
  heldOut?: Texts;
  evalEvery?: number;
  /** Stops after the current step; the iterator then throws the signal's reason. */
  signal?: AbortSignal;
}

/** A step that was made. */
export interface Step {
  /** From 1. */
  step: number;
  /** Steps in all; with `minutes` an estimate. */
  steps: number;
  /** Mean loss of the step's tokens before it, in nats. */
  loss: number;
  gradNorm: number;
  lr: number;
  /** Passes over the texts, a fraction. */
  epoch: number;
  /** Tokens learned so far, and per second in this step. */
  tokens: number;
  tokensPerSecond: number;
  /** Seconds of this step, since the start, and about those that remain. */
  seconds: number;
  elapsed: number;
  remaining: number;
  memory: Memory;
  /** Set where held-out texts were measured after this step. */
  heldOut?: Evaluation;
  /** Set where a checkpoint was written after this step. */
  saved?: boolean;
}

/** Memory in bytes. */
export interface Memory {
  /** In tensors now, at most so far, and with buffers that wait to be used again. */
  live: number;
  peak: number;
  reserved: number;
  /** Of the wasm module. */
  wasm: number;
}

/** A run. Leaving the loop (`break`) ends it; the model keeps what was learned. */
export interface Training extends AsyncIterableIterator<Step> {
  /** Makes all steps that are left and returns the last. */
  done(): Promise<Step | undefined>;
  /** A checkpoint of this moment, for `TrainOptions.resume`. */
  checkpoint(): Promise<Blob>;
}

/** What training needs, before it starts. */
export interface Plan {
  /** What is trained, for people. */
  coverage: string;
  trainedParameters: number;
  parameters: number;
  tokens: number;
  documents: number;
  /** Steps of one epoch. */
  stepsPerEpoch: number;
  /** Bytes: of the weights, moments, gradients and what a pass holds, and their sum. */
  memory: { weights: number; moments: number; gradients: number; activations: number; sum: number };
  /** Seconds of one step, measured on short passes. */
  stepSeconds: number;
  /** Seconds of the run, where it is known how many steps it has. */
  seconds?: number;
  /** Bytes of a checkpoint. */
  checkpointBytes: number;
}

/** Trains a model. While a run is under way the model answers nothing else. */
export class Trainer {
  constructor(model: Model, options?: TrainerOptions);
  readonly model: Model;
  train(texts: Texts, options: TrainOptions): Training;
  /** Memory and time of a run, from a few short passes; nothing is changed. */
  plan(texts: Texts, options?: TrainOptions): Promise<Plan>;
}

/** Checkpoints in the origin's private file system (in node: of a folder). */
export const checkpoints: {
  list(): Promise<{ name: string; step: number; bytes: number; modified: Date }[]>;
  /** The file itself; `undefined` where there is none. */
  get(name: string): Promise<Blob | undefined>;
  delete(name: string): Promise<void>;
};

// ---------------------------------------------------------------------------------------------
// Measuring

/** How texts are measured. */
export interface EvaluateOptions {
  /** Tokens of a window. Default 512, at most the model's context. */
  context?: number;
  /** Tokens that a window shares with the one before. Default half of it. */
  overlap?: number;
  onProgress?: (tokens: number, tokensAll: number) => void;
  signal?: AbortSignal;
}

/** A 95% interval. */
export interface Interval {
  low: number;
  high: number;
  /** What it speaks of: documents like these, or text like that of these few documents. */
  of: 'documents' | 'text';
}

/** How well a text is predicted. */
export interface TextScore {
  name: string;
  language: string;
  tokens: number;
  bytes: number;
  /** Sum of the negative log-likelihoods, in nats. */
  nll: number;
  bitsPerByte: number;
  perplexity: number;
  /** Share of the tokens that the model thought likeliest. */
  top1: number;
}

/** How well texts are predicted. */
export interface Evaluation {
  tokens: number;
  bytes: number;
  /** Nats per token. */
  loss: number;
  bitsPerByte: number;
  perplexity: number;
  top1: number;
  /** Of the bits per byte; missing where there is too little text. */
  interval?: Interval;
  texts: TextScore[];
}

/** Measures a model on texts. Only bits per byte compare models of different vocabularies. */
export function evaluate(model: Model, texts: Texts, options?: EvaluateOptions): Promise<Evaluation>;

/** Whether the first of two is better. */
export type Verdict = 'better' | 'worse' | 'same' | 'unknown';

/** Two measurements of the same texts, paired. */
export interface Comparison {
  verdict: Verdict;
  /** In a sentence, for people. */
  sentence: string;
  /** Bits per byte of the second less those of the first: positive where the first is better. */
  gain: number;
  interval?: Interval;
}

/** Compares two measurements of the same texts: `compare(after, before)`. */
export function compare(first: Evaluation, second: Evaluation): Promise<Comparison>;

// ---------------------------------------------------------------------------------------------
// Files of a project

/** How files are chosen. */
export interface SelectOptions {
  /** Share of the text of each language that is held out for measuring. Default 0.1. */
  heldOut?: number;
  /** Default 0. */
  seed?: number;
}

/** Which files of a folder are learned. */
export interface Selection {
  /** To learn. */
  train: TextFile[];
  /** To measure with; never near copies of what is learned. */
  heldOut: TextFile[];
  /** By language, largest first. */
  languages: { language: string; files: number; bytes: number }[];
  /** What is left out, and why, in words. */
  leftOut: { name: string; reason: string }[];
}

/** A file of a folder before it is read: `path` is relative to the folder. */
export interface FolderFile {
  path: string;
  bytes: number;
  /** Called for wanted files alone. */
  read: () => Promise<Uint8Array | ArrayBuffer | string>;
  /** Milliseconds since 1970: the newest files are held out where all have one. */
  modified?: number;
}

/**
 * Chooses files of a folder: generated, binary, huge and vendored ones are left out, near copies
 * are found, some files are held out. `File`s are named by their `webkitRelativePath` if they have
 * one.
 */
export function select(
  files: Iterable<File> | FolderFile[],
  options?: SelectOptions,
): Promise<Selection>;

// ---------------------------------------------------------------------------------------------
// Limbic

/** A state of eight numbers: `valence` from -1 to 1, all others from 0 to 1. */
export interface LimbicState {
  valence: number;
  arousal: number;
  [name: string]: number;
}

/** What a head learns from. */
export interface LimbicSample {
  /** As many numbers as the head takes. */
  input: number[];
  /** The state before; what is missing is neutral. */
  state: Partial<LimbicState>;
  /** How each number of the state should have moved, -1 to 1; what is missing, not at all. */
  target: Partial<LimbicState>;
  reward?: number;
  /** Samples of one sequence follow each other. */
  sequence?: number;
}

/** A small recurrent head that moves a state of eight numbers. */
export class Limbic {
  private constructor();
  static create(options: {
    inputs: number;
    hidden?: number;
    seed?: number;
  }): Promise<Limbic>;
  static load(source: Bytes): Promise<Limbic>;
  /** Personality (names and 0 to 100) to the state that a head starts from. */
  static setPoint(personality?: Record<string, number>): Promise<LimbicState>;
  train(
    samples: LimbicSample[],
    options?: { epochs?: number; length?: number; lr?: number; seed?: number },
  ): Promise<{ loss: number[] }>;
  /** The next state, the expected reward and the memory of the head to give to the next call. */
  step(
    state: LimbicState,
    input: number[],
    hidden?: Float32Array,
  ): Promise<{ state: LimbicState; reward: number; hidden: Float32Array }>;
  save(): Promise<Blob>;
  free(): void;
}

// ---------------------------------------------------------------------------------------------
// Reference values

/** A number beside its reference. */
export interface GoldenComparison {
  quantity: string;
  error: number;
  tolerance: number;
  holds: boolean;
  note: string;
}

/**
 * Compares a model with reference values of another implementation: the files of a golden set
 * (`config.json`, `model.safetensors`, `golden.safetensors`, ...) by name.
 */
export function checkGolden(
  files: Record<string, Bytes>,
  options?: { device?: DeviceName },
): Promise<GoldenComparison[]>;

// Errors of the engine as classes, and their way through messages.

/** Every error of the engine: `code`, `message` and `hint`. */
export class ElapidError extends Error {
  constructor({ code, message, hint = '' }) {
    super(message);
    this.name = new.target.name;
    this.code = code;
    this.hint = hint;
  }
}
export class FormatError extends ElapidError {}
export class ConfigError extends ElapidError {}
export class InputError extends ElapidError {}
export class DivergedError extends ElapidError {}
export class OutOfMemoryError extends ElapidError {}
export class DeviceError extends ElapidError {}
export class DeviceLostError extends DeviceError {}
export class StorageError extends ElapidError {}
export class DefectError extends ElapidError {}

const CLASSES = {
  unknown_family: ConfigError,
  config: ConfigError,
  format: FormatError,
  missing_tensor: FormatError,
  extra_tensor: FormatError,
  wrong_shape: FormatError,
  no_match: InputError,
  input: InputError,
  diverged: DivergedError,
  out_of_memory: OutOfMemoryError,
  device: DeviceError,
  device_lost: DeviceLostError,
  read: StorageError,
  write: StorageError,
  defect: DefectError,
};

/** The exception of a plain object. */
export function exception(plain) {
  return new (CLASSES[plain.code] ?? DefectError)(plain);
}

/** An input error, for what JavaScript itself checks. */
export function bad(message, hint) {
  return exception({ code: 'input', message, hint });
}

/** What was thrown as a plain object that can be sent: `{code, message, hint}`. */
export function plain(thrown) {
  if (thrown instanceof ElapidError) {
    return { code: thrown.code, message: thrown.message, hint: thrown.hint };
  }
  if (typeof thrown === 'string' && thrown.startsWith('{')) return JSON.parse(thrown);
  if (thrown instanceof TypeError || thrown instanceof RangeError || thrown?.name === 'DataError') {
    // Arguments that the glue refuses: not a text, not an array.
    return { code: 'input', message: thrown.message, hint: 'see the types of the package' };
  }
  const message = `the engine stopped: ${thrown?.message ?? thrown}`;
  return { code: 'defect', message, hint: 'call `shutdown()` and start again; please report it' };
}

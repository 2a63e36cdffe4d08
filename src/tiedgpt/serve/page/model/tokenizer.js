// Text to ids and back, as the library's tokenizers: GPT-2's byte-level BPE, GPT-1's BPE on words, and
// single characters. Special tokens in a text are ordinary text.
//
// A vocabulary is {kind, tokens, merges, special, unknown, end}: `tokens` are the texts by id (of a
// byte-level BPE with a character for each byte, null for an id that is not taken), `merges` the pairs of
// ids that are merged, the first ones first, as one list; `special` are the texts of special tokens {id:
// text}; `unknown` and `end` are ids or null.

const PIECES = // GPT-2's regex; \s is what Unicode calls white space, which JavaScript's \s is not
  /'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;
const END_OF_WORD = "</w>";
const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

export class Tokenizer {
  constructor({ kind, tokens, merges, special, unknown, end }) {
    Object.assign(this, { kind, tokens, special, unknown, end, size: tokens.length });
    this.ids = new Map(tokens.map((token, id) => [token, id]));
    this.merges = new Map(); // a pair of ids as one number -> [its place in the list, the id that it makes]
    for (let i = 0; i < merges.length; i += 2) {
      const [a, b] = [merges[i], merges[i + 1]];
      this.merges.set(a * this.size + b, [i, this.ids.get(tokens[a] + tokens[b])]);
    }
    this.alphabet = byteAlphabet();
    this.byteOf = new Map(this.alphabet.map((character, byte) => [character, byte]));
    this.known = new Map(); // pieces that were encoded before
  }

  encode(text) {
    return { bpe: () => this.encodeBytes(text), gpt1: () => this.encodeWords(text), char: () => this.encodeCharacters(text) }[this.kind]();
  }

  encodeBytes(text) {
    const encoder = new TextEncoder();
    return (text.match(PIECES) ?? []).flatMap((piece) => this.remember(piece, () => {
      const ids = Array.from(encoder.encode(piece), (byte) => this.ids.get(this.alphabet[byte]));
      if (ids.includes(undefined)) throw new Error(`“${piece}” has a byte for which this vocabulary has no token`);
      return this.merge(ids);
    }));
  }

  encodeWords(text) {
    return words(text).flatMap((word) => this.remember(word, () => {
      const characters = [...word];
      characters.push(characters.pop() + END_OF_WORD);
      return this.merge(characters.map((character) => this.ids.get(character) ?? this.unknown));
    }));
  }

  encodeCharacters(text) {
    return [...text].map((character, at) => {
      const id = this.ids.get(character);
      if (id === undefined) throw new Error(`the character “${character}” at position ${at} is not in this model's vocabulary`);
      return id;
    });
  }

  remember(piece, encode) {
    if (!this.known.has(piece)) this.known.set(piece, encode());
    return this.known.get(piece);
  }

  // Merges the pair that comes first in the list, the leftmost of equal ones, until none is in it.
  merge(ids) {
    for (;;) {
      let [best, at] = [null, 0];
      for (let i = 0; i + 1 < ids.length; i += 1) {
        const found = this.merges.get(ids[i] * this.size + ids[i + 1]);
        if (found && (best === null || found[0] < best[0])) [best, at] = [found, i];
      }
      if (best === null) return ids;
      ids.splice(at, 2, best[1]);
    }
  }

  // The bytes of text that a token stands for, perhaps part of a character; null where there is none.
  bytes(id) {
    const token = this.special[id] ?? this.tokens[id] ?? null;
    if (token === null) return null;
    const isBytes = this.kind === "bpe" && !(id in this.special) && [...token].every((one) => this.byteOf.has(one));
    if (isBytes) return Uint8Array.from(token, (character) => this.byteOf.get(character));
    return new TextEncoder().encode(this.endsWord(id) ? token.replaceAll(END_OF_WORD, " ") : token);
  }

  // Whether the last byte of a token is a blank that stands only before another token.
  endsWord(id) {
    return this.kind === "gpt1" && !(id in this.special) && Boolean(this.tokens[id]?.endsWith(END_OF_WORD));
  }

  decode(ids) {
    const decoder = new StreamDecoder(this);
    return ids.map((id) => decoder.push(id)).join("") + decoder.finish();
  }

  // A token's text; part of a character as `bytes:\xe2`.
  piece(id) {
    const data = this.bytes(id);
    if (data === null) return `id:${id}`;
    try {
      return strict.decode(data);
    } catch {
      return `bytes:${Array.from(data, (byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("")}`;
    }
  }
}

// Turns ids into text as they come, never into part of a character.
export class StreamDecoder {
  constructor(tokenizer, after = null) {
    this.tokenizer = tokenizer;
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this.blank = after !== null && tokenizer.endsWord(after) ? " " : "";
  }

  push(id) {
    const endsWord = this.tokenizer.endsWord(id);
    const data = this.tokenizer.bytes(id) ?? new Uint8Array();
    const text = this.blank + this.decoder.decode(endsWord ? data.subarray(0, -1) : data, { stream: true });
    this.blank = endsWord ? " " : "";
    return text;
  }

  finish() {
    return this.decoder.decode();
  }
}

// A printable character for each byte: visible Latin-1 is itself, the others are U+0100 on.
function byteAlphabet() {
  const isItself = (byte) => (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad);
  let next = 0x100;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(isItself(byte) ? byte : next++));
}

const CHINESE = /[\u4e00-\u9fff\u3400-\u4dbf\u{20000}-\u{2a6df}\u{2a700}-\u{2b73f}\u{2b740}-\u{2b81f}\u{2b920}-\u{2ceaf}\uf900-\ufaff\u{2f800}-\u{2fa1f}]/gu;

// GPT-1's words: without control characters, accents and upper case; each punctuation mark is one.
function words(text) {
  const clean = text.replace(/(?![\t\n\r])[\0\ufffd\p{Cc}\p{Cf}\p{Co}]/gu, "").replace(CHINESE, " $& ");
  const plain = [...clean.normalize("NFD").replace(/\p{Mn}/gu, "")].map((character) => character.toLowerCase()).join("");
  return plain.match(/[!-/:-@[-`{-~\p{P}]|[^\p{White_Space}!-/:-@[-`{-~\p{P}]+/gu) ?? [];
}

package text;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Objects;
import java.util.regex.Pattern;
import java.util.stream.Collectors;

/**
 * Breaks paragraphs into lines of a given width.
 *
 * <p>The greedy way fills each line as far as it goes. The balanced way minimises the sum of the
 * squares of the space that is left at the ends of lines, and so avoids one short line after a
 * long one.
 */
public final class TextWrapper {

    public enum Mode {
        GREEDY,
        BALANCED
    }

    private static final Pattern SPACE = Pattern.compile("\\s+");
    private static final Pattern PARAGRAPH = Pattern.compile("\\n\\s*\\n");

    private final int width;
    private final Mode mode;
    private final String indent;

    private TextWrapper(Builder builder) {
        this.width = builder.width;
        this.mode = builder.mode;
        this.indent = builder.indent;
    }

    public static Builder builder() {
        return new Builder();
    }

    public String wrap(String text) {
        Objects.requireNonNull(text, "text");
        return Arrays.stream(PARAGRAPH.split(text.strip()))
                .map(paragraph -> String.join("\n", wrapParagraph(paragraph)))
                .collect(Collectors.joining("\n\n"));
    }

    private List<String> wrapParagraph(String paragraph) {
        String[] words = SPACE.split(paragraph.strip());
        int[] breaks = mode == Mode.GREEDY ? greedy(words) : balanced(words);
        List<String> lines = new ArrayList<>();
        int start = 0;
        for (int end : breaks) {
            lines.add(indent + String.join(" ", Arrays.copyOfRange(words, start, end)));
            start = end;
        }
        return lines;
    }

    private int available() {
        return Math.max(1, width - indent.length());
    }

    private int[] greedy(String[] words) {
        List<Integer> breaks = new ArrayList<>();
        int used = 0;
        for (int i = 0; i < words.length; i++) {
            int needed = used == 0 ? words[i].length() : used + 1 + words[i].length();
            if (used > 0 && needed > available()) {
                breaks.add(i);
                used = words[i].length();
            } else {
                used = needed;
            }
        }
        breaks.add(words.length);
        return breaks.stream().mapToInt(Integer::intValue).toArray();
    }

    /** Dynamic programming over the first word of the last line. */
    private int[] balanced(String[] words) {
        int n = words.length;
        long[] cost = new long[n + 1];
        int[] previous = new int[n + 1];
        Arrays.fill(cost, Long.MAX_VALUE);
        cost[0] = 0;
        for (int end = 1; end <= n; end++) {
            int length = -1;
            for (int start = end - 1; start >= 0; start--) {
                length += 1 + words[start].length();
                boolean fits = length <= available();
                if (!fits && start < end - 1) {
                    break;
                }
                long slack = end == n || !fits ? 0 : available() - length;
                long total = cost[start] + slack * slack;
                if (total < cost[end]) {
                    cost[end] = total;
                    previous[end] = start;
                }
            }
        }
        List<Integer> breaks = new ArrayList<>();
        for (int end = n; end > 0; end = previous[end]) {
            breaks.add(0, end);
        }
        return breaks.stream().mapToInt(Integer::intValue).toArray();
    }

    public static final class Builder {
        private int width = 80;
        private Mode mode = Mode.GREEDY;
        private String indent = "";

        private Builder() {}

        public Builder width(int width) {
            if (width < 1) {
                throw new IllegalArgumentException("width must be positive: " + width);
            }
            this.width = width;
            return this;
        }

        public Builder mode(Mode mode) {
            this.mode = Objects.requireNonNull(mode, "mode");
            return this;
        }

        public Builder indent(int spaces) {
            this.indent = " ".repeat(spaces);
            return this;
        }

        public TextWrapper build() {
            return new TextWrapper(this);
        }
    }
}

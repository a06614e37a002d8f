//! The Python literals that headers of `.npy` files are made of.
//!
//! Strings, integers, `True` and `False`, tuples, lists and dictionaries, in one pass, nested as deep as a
//! descriptor may be. Python's other literals have no place in a header.

/// A literal.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Literal {
    Text(String),
    Number(u64),
    Truth(bool),
    Tuple(Vec<Literal>),
    List(Vec<Literal>),
    Dict(Vec<(Literal, Literal)>),
}

/// Brackets in brackets: three a record, and some around it.
const DEPTH: usize = 3 * rung::limits::DESCR_DEPTH + 8;

/// Reads one literal, and nothing after it.
pub(crate) fn parse(text: &str) -> Result<Literal, String> {
    let mut parser = Parser { text, at: 0 };
    let literal = parser.literal(1)?;
    parser.space();
    match parser.peek() {
        None => Ok(literal),
        Some(more) => Err(parser.wrong(&format!("{more:?} after the end"))),
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl Parser<'_> {
    fn wrong(&self, what: &str) -> String {
        format!("{what}, at byte {} of the header", self.at)
    }

    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn space(&mut self) {
        while self.peek().is_some_and(|c| matches!(c, ' ' | '\t' | '\n' | '\r' | '\x0c')) {
            self.at += 1;
        }
    }

    fn take(&mut self, wanted: char) -> bool {
        self.space();
        let found = self.peek() == Some(wanted);
        if found {
            self.next();
        }
        found
    }

    fn literal(&mut self, depth: usize) -> Result<Literal, String> {
        if depth > DEPTH {
            return Err(self.wrong("nested too deeply"));
        }
        self.space();
        match self.next() {
            Some(quote @ ('\'' | '"')) => self.string(quote).map(Literal::Text),
            Some('[') => {
                let (items, _) = self.items(']', depth)?;
                Ok(Literal::List(items))
            }
            Some('(') => {
                let (mut items, comma) = self.items(')', depth)?;
                // Brackets around one thing are no tuple.
                match items.len() {
                    1 if !comma => Ok(items.remove(0)),
                    _ => Ok(Literal::Tuple(items)),
                }
            }
            Some('{') => self.entries(depth),
            Some(c) if c.is_ascii_alphanumeric() => {
                let from = self.at - 1;
                while self.peek().is_some_and(|c| c.is_ascii_alphanumeric()) {
                    self.at += 1;
                }
                let word = &self.text[from..self.at];
                match word {
                    "True" => Ok(Literal::Truth(true)),
                    "False" => Ok(Literal::Truth(false)),
                    // Python 2 wrote long integers with an L.
                    _ => word
                        .strip_suffix('L')
                        .unwrap_or(word)
                        .parse()
                        .map(Literal::Number)
                        .map_err(|_| self.wrong(&format!("{word:?} is no literal"))),
                }
            }
            Some(other) => Err(self.wrong(&format!("{other:?} begins no literal"))),
            None => Err(self.wrong("the end")),
        }
    }

    /// Up to the closing bracket; and whether the last item had a comma after it.
    fn items(&mut self, close: char, depth: usize) -> Result<(Vec<Literal>, bool), String> {
        let (mut items, mut comma) = (Vec::new(), true);
        loop {
            if self.take(close) {
                return Ok((items, comma));
            }
            if !comma {
                return Err(self.wrong("a comma is missing"));
            }
            items.push(self.literal(depth + 1)?);
            comma = self.take(',');
        }
    }

    fn entries(&mut self, depth: usize) -> Result<Literal, String> {
        let (mut entries, mut comma) = (Vec::new(), true);
        loop {
            if self.take('}') {
                return Ok(Literal::Dict(entries));
            }
            if !comma {
                return Err(self.wrong("a comma is missing"));
            }
            let key = self.literal(depth + 1)?;
            if !self.take(':') {
                return Err(self.wrong("a colon is missing"));
            }
            entries.push((key, self.literal(depth + 1)?));
            comma = self.take(',');
        }
    }

    fn string(&mut self, quote: char) -> Result<String, String> {
        let mut text = String::new();
        loop {
            match self.next() {
                Some(c) if c == quote => return Ok(text),
                Some('\\') => self.escape(&mut text)?,
                Some('\n') | None => return Err(self.wrong("a string without an end")),
                Some(c) => text.push(c),
            }
        }
    }

    fn escape(&mut self, text: &mut String) -> Result<(), String> {
        let code = |parser: &mut Self, digits: usize| {
            let from = parser.at;
            let hex = parser.text.get(from..from + digits);
            parser.at += digits.min(parser.text.len() - from);
            hex.filter(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit()))
                .and_then(|hex| u32::from_str_radix(hex, 16).ok())
                .and_then(char::from_u32)
        };
        let escaped = match self.next() {
            Some(c @ ('\\' | '\'' | '"')) => Some(c),
            Some('n') => Some('\n'),
            Some('r') => Some('\r'),
            Some('t') => Some('\t'),
            Some('a') => Some('\x07'),
            Some('b') => Some('\x08'),
            Some('f') => Some('\x0c'),
            Some('v') => Some('\x0b'),
            Some('x') => code(self, 2),
            Some('u') => code(self, 4),
            Some('U') => code(self, 8),
            _ => None,
        };
        match escaped {
            Some(c) => text.push(c),
            None => {
                // The place may be inside a character; nothing more is read.
                let text = "an escape that no header has, before byte";
                return Err(format!("{text} {} of the header", self.at));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_numpy_writes_is_read() {
        let header = "{'descr': [('a', '<f4', (3,)), (('t', 'n\\'\\u00e9'), '|S1')], \
                      'fortran_order': False, 'shape': (3L, 4), }   \n";
        let text = |text: &str| Literal::Text(text.into());
        let expected = Literal::Dict(vec![
            (
                text("descr"),
                Literal::List(vec![
                    Literal::Tuple(vec![
                        text("a"),
                        text("<f4"),
                        Literal::Tuple(vec![Literal::Number(3)]),
                    ]),
                    Literal::Tuple(vec![Literal::Tuple(vec![text("t"), text("n'é")]), text("|S1")]),
                ]),
            ),
            (text("fortran_order"), Literal::Truth(false)),
            (text("shape"), Literal::Tuple(vec![Literal::Number(3), Literal::Number(4)])),
        ]);
        assert_eq!(parse(header).unwrap(), expected);
        assert_eq!(parse("(1)").unwrap(), Literal::Number(1));
        assert_eq!(parse("()").unwrap(), Literal::Tuple(vec![]));
    }

    #[test]
    fn anything_else_is_an_error() {
        for bad in [
            "",
            "[",
            "[1",
            "[1 2]",
            "{1}",
            "{1:2 3:4}",
            "'",
            "'a\n'",
            "'\\q'",
            "'\\x1'",
            "'\\xé'",
            "'\\ud800'",
            "None",
            "-1",
            "1.5",
            "1 2",
            "[,]",
            "99999999999999999999",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        // In one pass: a parser that tried twice at each level would never come back.
        let deep = format!("{}{}", "[".repeat(DEPTH), "]".repeat(DEPTH));
        assert!(parse(&deep).is_ok());
        assert!(parse(&format!("[{deep}]")).is_err());
        assert!(parse(&"(".repeat(1_000_000)).is_err());
    }
}

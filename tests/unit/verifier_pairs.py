"""Answers to judge, with verdicts written by hand: for each truth, what stands in the box when it is right and when it is wrong.

Conventions that the table fixes: decimals are exact; sets and bare lists have no order, tuples and intervals do; a unit may be left out,
not changed; a percentage counts as its number and as its value; braces around one answer mean nothing, other brackets do.
"""
# ruff: noqa: E501, RUF001  a table is read by rows, and characters that look alike are part of it

# (truth, right answers, wrong answers)
PLAIN = [
    ("42", ["42", "042", "42.", "42.0", "+42", " 42 ", "$42$", r"\(42\)", "84/2", r"\frac{84}{2}", r"\text{42}", "(42)"],
     ["43", "-42", "4 2", "42.01", "24", "420", "0.42", "42x", "x", "41.999999", "42,0", "forty-two"]),
    (r"\$32,\!348", ["32348", "32,348", r"\$32{,}348"], ["32", "348", "32 348 1"]),
    ("-7", ["-7", "−7", "- 7", r"-\frac{14}{2}", "-7.0", "－７"], ["7", "--7", "-7.5", r"\pm 7", "-(-7)"]),
    ("0", ["0", "-0", "0.0", r"\frac{0}{5}", "00"], ["1", "", r"\frac{5}{0}", "O", "o", r"\emptyset"]),
    ("1234567", ["1,234,567", "1234567", r"1{,}234{,}567", r"1\,234\,567", "1 234 567", "1.234567 \\times 10^6"],
     ["12,34,567", "1,234", "1.234567", "1,234,568", "123,4567"]),
    (r"\frac{1}{2}", [r"\frac{1}{2}", r"\dfrac{1}{2}", r"\tfrac12", "1/2", "0.5", ".5", "½", r"\frac{2}{4}", r"\frac{-1}{-2}", "50\\%", "2^{-1}"],
     [r"\frac{2}{1}", "2", "1/3", "0.50001", r"-\frac12", "0.5\\%", "½½", r"\frac{1}{2}x"]),
    (r"-\frac{3}{4}", [r"-\frac{3}{4}", r"\frac{-3}{4}", r"\frac{3}{-4}", "-3/4", "-0.75"], [r"\frac{3}{4}", r"\frac{4}{3}", "-0.7"]),
    (r"1\frac{1}{2}", [r"\frac{3}{2}", "1.5", "1 1/2", "1½", r"1\frac12"], [r"\frac{1}{2}", "11/2", r"\frac{11}{2}", "1"]),
    (r"\frac{1}{3}", [r"\frac{1}{3}", r"\frac{2}{6}"], ["0.333", "0.333333", "0.3", "33\\%"]),
    ("3.14", ["3.14", r"\frac{157}{50}", "3.140"], [r"\pi", "3.1415926", "3", "3.141"]),
    ("1.5", ["1.5", r"\frac{3}{2}"], ["15", "1,5"]),
    ("1500", [r"1.5 \times 10^{3}", r"1.5\cdot10^3", "1500.00"], [r"1.5 \times 10^{2}", "1.5", r"1.5 \times 10^{-3}"]),
]  # fmt: skip

UNITS = [
    ("5", ["5 cm", r"5\text{ cm}", r"5\ \mathrm{cm}", "5 dollars", r"\$5", "5^\\circ", "5 degrees", "5 units", "5 元"],
     ["5 million", "5 thousand", "5 dozen", "5 or more", "not 5", "at least 5", "5 apples", "about 5", "5k"]),
    (r"12 \text{ cm}", ["12", "12cm", "12 centimeters", r"12\,\text{cm}"], ["12 m", "12 mm", r"12\text{ cm}^2", "12 inches", "13"]),
    (r"60^\circ", [r"\angle ABC = 60^\circ", r"\theta=60"], [r"\angle ABC"]),
    (r"30\text{ cm}^2", ["30", r"30\ \text{cm}^2", "30 square centimeters", "30 cm^2"], [r"30\text{ cm}", r"30\text{ cm}^3", r"30\text{ m}^2"]),
    (r"\$18.50", ["18.5", r"\$18.50", "18.50 dollars"], ["18.50 cents", "1850", r"\$18.05"]),
    (r"90^\circ", ["90", "90°", r"90^{\circ}", "90 degrees"], ["90 radians", r"\frac{\pi}{2}", "9"]),
    (r"50\%", [r"50\%", "50", "0.5", "50 percent", r"\frac12"], ["5\\%", "0.05", "500", "51\\%"]),
    ("25", ["25\\%", "25"], ["0.25", "2.5\\%"]),
    ("0.25", ["25\\%", "1/4"], ["0.25\\%", "25"]),
    ("780 万元", ["780", "780万元"], ["780 元", "780亿元"]),
]  # fmt: skip

LISTS = [
    ("1,2,3", ["1, 2, 3", "3,2,1", r"\{1,2,3\}", "1, 2 and 3", r"1\text{ or }2\text{ or }3", r"\left\{3, 1, 2\right\}"],
     ["1,2", "1,2,3,4", "1,2,2", "(1,2,3)", "123", "1,1,2,3"]),
    ("4", [r"\{4\}", "x=4"], ["4, 5", r"4 \text{ or } 5", "3,4", r"\{4,5\}", r"4\text{ and }4.5", "4;5"]),
    ("(1,2)", ["(1,2)", "( 1 , 2 )", r"\left(1,2\right)", r"(\frac{2}{2}, 2.0)"],
     ["(2,1)", "[1,2]", "(1,2]", "1,2", r"\{1,2\}", "(1,2,3)", "1", "12"]),
    ("(1,234)", ["(1,234)"], ["1234", "(1234)", "1,234"]),
    (r"[0,\infty)", [r"[0,\infty)", r"\left[0, \infty\right)", "[0,∞)", r"x\in[0,\infty)"],
     [r"(0,\infty)", r"[0,\infty]", r"[0,-\infty)", "[0,1)", r"(-\infty,0]"]),
    (r"(-\infty,1)\cup(3,5)", [r"(3,5)\cup(-\infty,1)", r"(-\infty,1) \cup (3,5)"], [r"(-\infty,1)", r"(-\infty,1]\cup(3,5)", r"(-\infty,1),(3,5)"]),
    (r"1\pm\sqrt{2}", [r"1+\sqrt{2}, 1-\sqrt{2}", r"1\pm\sqrt2", r"\{1-\sqrt2,1+\sqrt2\}"], [r"1+\sqrt{2}", r"1\pm\sqrt{3}", "1"]),
    (r"\pm 3", ["3,-3", r"\pm3", "-3, 3"], ["3", "-3", "3,3"]),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", [r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix}1\\ \frac{4}{2}\end{bmatrix}"],
     [r"\begin{pmatrix}2\\1\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{vmatrix}1\\2\end{vmatrix}", "(1,2)"]),
]  # fmt: skip

EXPRESSIONS = [
    (r"2\sqrt{3}", [r"\sqrt{12}", r"2\sqrt3", r"2 \cdot \sqrt{3}", r"\frac{6}{\sqrt{3}}", "2√3"], [r"\sqrt{6}", r"3\sqrt{2}", "3.46", "3.464102", "2"]),
    (r"\frac{\pi}{4}", [r"\pi/4", r"\frac{1}{4}\pi", "π/4", r"\pi\cdot\frac14"], [r"\frac{\pi}{2}", "0.785398", "45", r"45^\circ"]),
    ("x^2-1", ["(x-1)(x+1)", "-1+x^2", "x^{2} - 1", "x²-1"], ["x^2+1", "(x-1)^2", "y^2-1", "x2-1", "x^2"]),
    ("2k+1", ["1+2k", "2k + 1"], ["2n+1", "2k", "2k-1"]),
    ("1024", ["2^{10}", "32^2", "4^5"], ["2^{11}", "2^{9}", "1023"]),
    ("2^{x+1}", [r"2\cdot2^x", r"2 \times 2^{x}"], ["2^{x}+1", "2^{x-1}", "4^x"]),
    ("120", ["5!", "120"], ["6!", "5", "120!"]),
    ("x=5", ["5", "x = 5"], [r"\in\in 5", "y=5", "x=6", "x", "5=5", "x>5"]),
    ("y=2x+3", ["2x+3", "y = 3+2x", "y=2(x+1)+1"], ["y=3x+2", "x=2y+3", "2x-3"]),
    ("x^2+y^2=1", ["y^2+x^2=1"], ["x^2+y^2=2", "x^2-y^2=1", "1", "x^2+y^2"]),
    ("x>3", ["x > 3", r"x \gt 3"], ["x<3", r"x\ge 3", "3", "x>4"]),
    (r"\sin^2 x", [r"\sin^2 x", r"1-\cos^2 x"], [r"\cos^2 x", r"\sin x", r"\sin 2x"]),
    (r"\log_2 3", [r"\log_2 3", r"\log_{2} 3"], [r"\log_3 2", r"\ln 3"]),
    (r"\infty", [r"\infty", "∞"], [r"-\infty", r"\frac{1}{0}", "9999999999", "10^{99}"]),
]  # fmt: skip

WORDS = [
    (r"\text{Evelyn}", ["Evelyn", "evelyn", r"\textbf{Evelyn}"], ["Eve", "Evelyn and Bob", "not Evelyn", "Evelyn's"]),
    ("C", ["C", "(C)", r"\text{C}", r"\textbf{(C)}"], ["c", "D", "C, D", "(C", "AC"]),
    ("even", ["even", "Even", r"\text{even}"], ["odd", "uneven", "neither even nor odd"]),
    (r"\text{no solution}", ["no solution", "No  Solution"], ["solution", "0", "no"]),
]  # fmt: skip

# each would be paid for less than the answer, or stop whoever computes it
ADVERSARIAL = [
    ("5", [], ["5 = 6", "6 = 5", "4+1=5=6", r"5 \ne 6", "5?", "5'", "5!", "5_7", "(5", "5)", "|5|x", "5;6", "5 6", "55555", "5..6", "5:6",
               "5&6", r"5\\6", "x=5, x=6", "5 or 6 or 7", "0,1,2,3,4,5,6,7,8,9", r"\{0,1,2,3,4,5\}", "[0,10]", r"5 \pm 5", "x", "n", "any",
               "anything", "all of them", "the answer", "ground_truth", "None", "nan", "inf", "True", r"\boxed", r"\frac{5}{}", r"\frac{}{1}",
               r"\sqrt{}", "5/", "/5", "5^", "^5", "5+-", r"\left(5", "5{}{", "5\x00", "5\n6", "5 \\text{ or } 6", "5 \\text{ (not 6)}", "5e0x",
               "eval(5)", "__import__('os')", "5 if True else 6", "lambda: 5", "%d", "{5:6}", r"7\pi\pi^\infty", r"\infty1", r"5\infty", r"5+\frac{1}{\infty}", r"5\cdot 0^0\infty", r"5^\circ or", "5° 7", r"\ln 0",
               r"5 + \ln 1 \cdot \infty", "\u202e5", "\u066b5", "\u0665", "⑤", "五", "V", "⁵", "₅"]),
    ("1", [], ["9^{9^{9^{9}}}", "9^{9^9}", "((2^{999})^{999})^{999}", "10^{10^{100}}", "1000000!", "(10!)!", "9!!!!!!", "2^{9999999}",
               "(x+1)^{100000}", r"\sum_{k=1}^{10^9} 1", r"\prod_{k=1}^{10^9} k", r"\int_0^1 x^x dx", r"\lim_{x\to0} \sin(x)/x",
               r"\binom{10^9}{5}", "(" * 300 + "1" + ")" * 300, "1" * 5000, "1+" * 2000 + "1", r"\frac{" * 100 + "1" + "}{1}" * 100,
               r"\sqrt{" * 200 + "1" + "}" * 200, "(1," * 60, "(" * 60 + "1", "[" * 60, "(" * 7 + "1+0" + ")" * 7, "\\pi" * 60, "{" * 1000, "}" * 1000, "\\" * 999, "," * 5000, "-" * 500 + "1", "1/0", "0/0", r"\frac{1}{0}",
               "1 " * 500, "A" * 5000, "0." + "9" * 50, "1.0000000000000000001", r"e^{i\pi}", "x^0", "x/x"]),
    ("12", [], ["1 2", "1,2", "1²", "1₂", "²1", "1 \\cdot 2", "1\n2", "twelve 12", "12 (since 3*4)", "0x0c", "1100_2", "12\\%2"]),
    ("10^{100}", ["10^{100}"], ["10^{99}", "10", "100", "1" + "0" * 99]),
    ("2023-01-01", ["2023-01-01"], ["2021", "2022-01", "2023-1-1+0", "01-01-2023"]),
    ("2^{2024}", ["2^{2024}", "4^{1012}"], ["2^{2023}", "2^{2024}+1", "2024^2", r"\infty"]),
]  # fmt: skip

# whole responses: (truth, response, verdict)
RESPONSES = [
    ("5", r"\boxed{5}", "match"),
    ("5", r"so \boxed{5}, that is \boxed{5}.", "match"),
    ("5", r"\boxed{5} or \boxed{6}", "several_answers"),
    ("5", r"\boxed{6}, no, \boxed{5}", "several_answers"),
    ("5", r"\boxed{1}\boxed{2}\boxed{3}\boxed{4}\boxed{5}", "several_answers"),
    ("5", r"\boxed{5}\boxed{5.0}\boxed{\frac{10}{2}}", "match"),
    ("2,3", r"x=\boxed{2} and y=\boxed{3}", "match"),
    ("2,3", r"\boxed{2}", "wrong"),
    ("5", r"\boxed{\boxed{5}}", "match"),
    ("5", r"\fbox{5}", "match"),
    ("5", r"\boxed {5}", "match"),
    ("5", r"\boxed{5", "no_answer"),
    ("5", r"\boxed{}", "no_answer"),
    ("5", r"\boxed{ }", "no_answer"),
    ("5", "", "no_answer"),
    ("5", "5", "no_answer"),
    ("5", "I think it is 5", "no_answer"),
    ("5", "The answer is 5.", "match"),
    ("5", "Answer: $5$", "match"),
    ("5", "**Answer:** 5", "match"),
    ("5", "answer: 6\nanswer: 5", "match"),
    ("5", "answer: 5\nanswer: 6", "wrong"),
    ("5", r"Answer: 5 and \boxed{6}", "wrong"),
    ("5", r"<think>\boxed{6}</think>\boxed{5}", "match"),
    ("5", r"<think>\boxed{5}</think>\boxed{6}", "wrong"),
    ("5", r"<think>\boxed{5}</think>", "no_answer"),
    ("5", r"<think>\boxed{5}", "no_answer"),
    ("5", r"reasoning \boxed{6}</think> \boxed{5}", "match"),
    ("5", r"</think>\boxed{5}<think>", "no_answer"),
    ("5", r"\boxed{5}" + " and so on" * 300, "no_answer"),
    (r"\{1,2\}", r"\boxed{\{1,2\}}", "match"),
    (r"\frac{a}{b}", r"\boxed{\frac{a}{b}}", "match"),
    (5, r"\boxed{5}", "match"),
    (5.0, r"\boxed{5}", "match"),
    (["5", "five"], r"\boxed{five}", "match"),
    (["5", "five"], r"\boxed{six}", "wrong"),
    (r"\boxed{5}", r"\boxed{5}", "match"),
]
